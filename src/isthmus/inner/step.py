"""The contract of every inner step: a callable that trains on one batch and can be saved."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Batch = dict[str, torch.Tensor]  # tensors with the samples along the first dimension, e.g. {"tokens": [batch, seq + 1]}
Metrics = dict[str, float]


class InnerStep(Protocol):
    """One training step inside one worker. Called once per batch; knows nothing of other workers."""

    def __call__(self, batch: Batch) -> Metrics:
        """Train on one batch."""
        ...

    def set_progress(self, step: int) -> None:
        """Say which step of the whole run comes next (counted from 0)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model, as plain values and live tensors (not copies)."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state."""
        ...
