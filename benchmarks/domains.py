"""Four kinds of text that every installation has: Python, C++, English, and tables of numbers."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

FOLDER = Path("runs/domains")
LARGEST = 2 << 20  # bytes of each
STDLIB = Path(sysconfig.get_path("stdlib"))
PYTHON = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml")


def _files() -> Iterator[tuple[str, Iterable[Path]]]:
    yield "python", (path for name in PYTHON for path in (STDLIB / name).rglob("*.py"))
    yield "cpp", (Path(torch.__file__).parent / "include/c10").rglob("*.h")
    yield "english", Path(torch.__file__).parents[1].glob("*.dist-info/METADATA")
    yield "tables", (STDLIB / "encodings").glob("*.py")


def make() -> tuple[str, ...]:
    """Copy the texts into a folder for each kind, where that has not been done; return the folders."""
    for kind, files in _files():
        folder = FOLDER / kind
        if folder.exists():
            continue
        folder.mkdir(parents=True)
        size = 0
        for number, path in enumerate(sorted(files)):
            if size < LARGEST:
                text = path.read_bytes()
                (folder / f"{number:04}.txt").write_bytes(text)
                size += len(text)
    return tuple(str(FOLDER / kind) for kind, _ in _files())
