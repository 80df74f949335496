"""What is kept for validation: one rule for all data.

What a data set itself keeps for validation is taken as it is: a split that is named (`validation_split`), a folder
`validation` or `val` beside `train`. Else `validation_fraction` of it is held out, by units that nobody cuts: the files
of a folder, speakers where they are known, rows of a table; of a single text its end.

Which units these are depends on their names or numbers alone, not on seed, worker or machine. So all workers and all
runs agree, and, where units have names, others that come or go leave them where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isthmus.data.shuffle import permute

RowNumbers = npt.NDArray[np.int64]  # [num_rows], sorted


def own_parts(root: Path) -> tuple[str, str] | None:
    """Return the names of a folder's own sub-folders to train on and to evaluate with, where it has both."""
    held_out = next((name for name in ("validation", "val") if (root / name).is_dir()), None)
    return None if held_out is None or not (root / "train").is_dir() else ("train", held_out)


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Return the names kept for validation: about `fraction` of them, at least one on either side.

    A hash of the name alone decides, so names that come or go leave the others where they are.
    """
    rank = {name: _hash(name) for name in names}
    chosen = {name for name in rank if rank[name] < fraction}
    chosen.add(min(rank, key=rank.__getitem__))
    chosen.discard(max(rank, key=rank.__getitem__))
    return chosen


def held_out_rows(num_rows: int, fraction: float) -> RowNumbers:
    """Return the numbers of the rows kept for validation, of at least two: one or more on either side."""
    num_held_out = min(max(1, round(num_rows * fraction)), num_rows - 1)
    return np.sort(permute(np.arange(num_held_out), num_rows, "validation"))


def rows_between_held_out(fraction: float) -> int:
    """Return k: every k-th row of a shard is kept for validation where nobody knows how many rows there are."""
    return max(2, round(1 / fraction))


def end_of_training(num_tokens: int, fraction: float) -> int:
    """Return where the end of a single text begins that is kept for validation."""
    return round(num_tokens * (1 - fraction))


def _hash(text: str) -> float:
    """A number from 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
