"""Which files there are, and which of them are kept for validation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """All files below `root`, sorted; not hidden ones, nor those in folders named in `skip` or behind links."""
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def held_out(names: Iterable[str], fraction: float) -> set[str]:
    """The names kept for validation: about `fraction` of them, at least one on either side.

    A hash of the name alone decides, so names that come or go leave the others where they are.
    """
    rank = {name: _hash(name) for name in names}
    chosen = {name for name in rank if rank[name] < fraction}
    chosen.add(min(rank, key=rank.__getitem__))
    chosen.discard(max(rank, key=rank.__getitem__))
    return chosen


def _raise(error: OSError) -> None:
    raise error


def _hash(text: str) -> float:
    """A number from 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
