"""Files that must be what they were when they were written, and on the disk when a name says so."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def fingerprint(path: Path) -> list[Any]:
    """Size in bytes and sha256."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def hash_plain(value: Any) -> str:
    """The sha256 of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Have a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
