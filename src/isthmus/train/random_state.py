"""The random numbers of one process, for dropout and the like; weights and data have seeds of their own."""

from __future__ import annotations

import random

import numpy as np
import torch

from isthmus.core import State


def seed(run_seed: int, stream: int) -> None:
    """Seed all generators; `stream` tells the processes of a run apart."""
    own = (run_seed * 1_000_003 + stream) % 2**32
    torch.manual_seed(own)
    np.random.seed(own)
    random.seed(own)


def save() -> State:
    """Return the state of all generators."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def load(state: State) -> None:
    """Go on from a saved state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
