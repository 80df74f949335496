"""The one rule for all data that says what is kept for validation.

What a data set itself keeps for validation is taken as it is: a split that is named (`validation_split`), a folder
`validation` or `val` beside `train`. Else `validation_fraction` of it is held out, by units that nobody cuts: the files
of a folder, speakers where they are known, rows of a table; of a single text its end.

Which units these are depends on their names or numbers alone, not on seed, worker or machine. So all workers and all
runs agree, and, where units have names, others that come or go leave them where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from isthmus.data.base import Positions
from isthmus.data.shuffle import permute

File = TypeVar("File")


def own_parts(root: Path) -> tuple[str, str] | None:
    """Return the names of a folder's own sub-folders to train on and to evaluate with, where it has both."""
    held_out = next((name for name in ("validation", "val") if (root / name).is_dir()), None)
    return None if held_out is None or not (root / "train").is_dir() else ("train", held_out)


def split_files(
    root: Path, files: Sequence[File], path: Callable[[File], str], unit: Callable[[File], str], fraction: float
) -> list[list[File]]:
    """Return the files below a folder to train on and to evaluate with.

    Args:
        root: the folder; by its own sub-folders, where it has both.
        files: all of them.
        path: of a file, relative to the folder.
        unit: of a file, which nobody cuts: else by this name's hash.
        fraction: of the units that are kept for validation.
    """
    if parts := own_parts(root):
        return [[file for file in files if path(file).startswith(f"{part}/")] for part in parts]
    return split_by_name(files, unit, fraction)


def split_by_name(units: Sequence[File], name: Callable[[File], str], fraction: float) -> list[list[File]]:
    """Return what to train on and to evaluate with; what has the same name is never parted."""
    kept = held_out_names(map(name, units), fraction)
    return [[each for each in units if (name(each) in kept) == is_validation] for is_validation in (False, True)]


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Return the names kept for validation: about `fraction` of them, at least one on either side.

    A hash of the name alone decides, so names that come or go leave the others where they are.
    """
    rank = {name: _hash(name) for name in names}
    chosen = {name for name in rank if rank[name] < fraction}
    if rank:
        chosen.add(min(rank, key=rank.__getitem__))
        chosen.discard(max(rank, key=rank.__getitem__))
    return chosen


def held_out_rows(num_rows: int, fraction: float) -> Positions:
    """Return the numbers of the rows kept for validation, of at least two: one or more on either side."""
    num_held_out = min(max(1, round(num_rows * fraction)), num_rows - 1)
    return np.sort(permute(np.arange(num_held_out), num_rows, "validation"))


def rows_between_held_out(fraction: float) -> int:
    """Return k: every k-th row of a shard is kept for validation where nobody knows how many rows there are."""
    return max(2, round(1 / fraction))


def _hash(text: str) -> float:
    """A number from 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
