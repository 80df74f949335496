"""Whole runs, each an `isthmus launch` of its own: started once, and their summaries read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(config: Path, folder: Path, workers: int, overrides: list[str]) -> dict[str, Any]:
    """The summary of a run; one that is in `folder` already and was finished is not repeated.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    path = folder / "summary.json"
    if not path.exists() or not json.loads(path.read_text())["finished"]:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "isthmus", "launch", str(config), "--workers", str(workers)]
        for value in (f"train.run_dir={folder}", *overrides):
            command += ["--set", value]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{folder.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def percent(value: float, reference: float | None) -> str:
    """How far above (or below) the reference; a dash where there is none."""
    return "-" if reference is None else f"{100 * (value / reference - 1):+.2f} %"
