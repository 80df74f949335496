"""A shuffled order of which any part can be read on its own."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from isthmus.data.base import Positions

_NUM_PASSES = 8


def permute(positions: Positions, size: int, key: str) -> Positions:
    """Return what stands at `positions` of the permutation of `range(size)` that `key` chooses.

    A Feistel network over the smallest 4**k >= size, applied again to what falls outside (cycle walking: Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). A part costs time and memory for itself alone, however
    large the whole is. And the order hangs on no library's random numbers: numpy may change its own from version to
    version, while workers on different machines must agree on every sample.

    Args:
        positions: [n] int64, each in `range(size)`.
        size: of the permuted range, 1 to 2**62.
        key: any text.

    Returns:
        [n] int64, each in `range(size)`; different positions give different values.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _NUM_PASSES).digest(), dtype="<u8")
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= size
    return values.astype(np.int64)


def permute_epochs(positions: Positions, size: int, seed: int) -> tuple[Positions, Positions]:
    """Return the epochs of positions in an endless order, and what stands there: each epoch is a permutation anew."""
    epochs, indices = np.divmod(positions, size)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permute(indices[here], size, f"{seed}/{epoch}")
    return epochs, indices


def derive(size: int, key: str) -> int:
    """Return the number in `range(size)` that `key` chooses."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % size


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of all numbers of 2 x `half` bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit of `x` (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
