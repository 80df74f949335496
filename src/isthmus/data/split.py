"""Which samples are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def held_out(names: Sequence[str], fraction: float) -> npt.NDArray[np.bool_]:
    """Choose validation data by a hash of each name, so that names that come or go leave the others where they are.

    Args:
        names: at least one, such as paths below a folder.
        fraction: of the names that is held out, about; at least one is on either side where there are two.

    Returns:
        [num_names], True for validation.
    """
    ranks = np.array([_hash(name) for name in names])
    chosen = ranks < fraction
    chosen[ranks.argmin()] = True
    chosen[ranks.argmax()] = False
    return chosen


def _hash(text: str) -> float:
    """A number from 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
