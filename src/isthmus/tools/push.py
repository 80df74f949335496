"""Uploading an exported model to the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.core import UserError


def hub_token() -> str:
    """Return the token of the environment, which must have one; no file is asked for one, and none is kept."""
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UserError("--push needs a token of the Hugging Face Hub that may write: set HF_TOKEN")
    return token


def push(folder: Path, repo: str, token: str) -> str:
    """Upload a folder to a repository on the Hub; return the address where it can be seen.

    It is called "owner/name", or "name" where the token's owner owns it. One that does not exist is made, and private.
    A `UserError` says why the Hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi  # takes a second to import

    api = HfApi(token=token)
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="isthmus export")
    except Exception as error:  # through which library it speaks, and what that raises, changes with its version
        reason = " ".join(str(error).split()).replace(token, "***")
        raise UserError(f"cannot push to {repo}: {reason}; upload {folder} by hand, or export again") from error
    return str(url)
