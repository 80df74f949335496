"""Python source to train on: a part of the standard library's, so that a run reads it again and again, or more."""

from __future__ import annotations

import random
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

from isthmus.data.text import Text
from isthmus.data.validation import split_by_name

FOLDER = Path("runs/python_text")
LARGE = str(FOLDER / "large")
_STDLIB = Path(sysconfig.get_path("stdlib"))
_TORCH = Path(torch.__file__).parent


def make_part(num_bytes: int) -> str:
    """Copy files of the standard library into a folder, about so many bytes; return the folder.

    The files held out are those of the whole library, whatever the size.
    """
    files = [Path(name) for name in Text().plain_texts]
    train, held_out = split_by_name(
        files, lambda path: path.relative_to(_STDLIB).as_posix(), Text().validation_fraction
    )
    random.Random(0).shuffle(train)
    drawn, size = list[Path](), 0
    for path in train:
        own = path.stat().st_size
        if size < 0.99 * num_bytes and size + own <= 1.02 * num_bytes:
            drawn.append(path)
            size += own
    folder = FOLDER / f"{num_bytes / 1e6:g}MB"
    _copy(drawn, _STDLIB, folder / "train")
    _copy(held_out, _STDLIB, folder / "validation")
    return str(folder)


def make_large() -> None:
    """Copy the standard library and PyTorch's own modules, 59 MB with torch 2.13, into the folder `LARGE`."""
    _copy(map(Path, Text().plain_texts), _STDLIB, Path(LARGE) / "stdlib")
    _copy(_TORCH.rglob("*.py"), _TORCH, Path(LARGE) / "torch")


def _copy(files: Iterable[Path], root: Path, folder: Path) -> None:
    for path in files:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
