"""Dated results: one JSON and one Markdown file a benchmark, with what a reader needs to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
WIDTH = 120


def circumstances() -> dict[str, Any]:
    """Date, commit, command, hardware, versions."""
    commit, dirty = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "src")
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "date": date.today().isoformat(),
        "commit": commit + ("+" if dirty else ""),
        "command": " ".join(["python -m benchmarks." + _module(), *sys.argv[1:]]),
        "hardware": f"{cpu}, {len(os.sched_getaffinity(0))} cores{gpu}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    """What git says, which may be nothing: not every machine has it, or the repository."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _module() -> str:
    """The benchmark that runs: a module, or a package."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def write(
    name: str,
    title: str,
    columns: list[str],
    rows: list[list[Any]],
    notes: list[str],
    data: Any,
    folder: Path = FOLDER,
) -> Path:
    """Write results/<date>-<name>.json (all data) and .md (the table); returns the latter's path."""
    facts = circumstances()
    stem = f"{facts['date']}-{name}"  # with_suffix would cut a name such as ladder-0.13M
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps({"circumstances": facts, "results": data}, indent=1) + "\n")
    said = ", ".join(f"{key}: {value}" for key, value in facts.items())
    lines = [f"# {title}", "", *wrap(said, WIDTH), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines += ["", *(line for note in notes for line in wrap(f"- {note}", WIDTH, subsequent_indent="  "))]
    path = folder / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n")
    return path
