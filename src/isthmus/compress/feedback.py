"""Error feedback: what was not sent is added to the next message."""

from dataclasses import dataclass

import torch

from isthmus.compress.base import Compressor
from isthmus.core.types import Peers, State, Tensors


@dataclass(frozen=True)
class ErrorFeedback:
    """Compress local + decay * residual, and keep the new residual (EF-SGD; SparseLoCo, arXiv 2508.15706, decay 0.95).

    The mean is that of the messages, so it lags behind the mean of `local` by what the residuals hold.
    """

    compressor: Compressor  # any compressor
    decay: float = 1.0  # share of the residual that is kept; 1 loses nothing over time

    @property
    def replicated(self) -> bool:
        """Whether the compressor inside gives every peer the same mean, bit for bit."""
        return self.compressor.replicated

    def message_fraction(self, state: State) -> float:
        """Return the fraction that the compressor inside sent."""
        return self.compressor.message_fraction(state.get("compressor", {}))

    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        """Return the mean of the messages, and what of `local` is not in this worker's own message.

        A message also holds what was left of earlier ones, so that is the new residual less the old.
        """
        old = state.get("residual")
        total = [tensor.float() for tensor in local]
        if old is not None:
            total = [torch.add(tensor, rest, alpha=self.decay) for tensor, rest in zip(total, old, strict=True)]
        inner: State = dict(state.get("compressor", {}))
        mean, residual = self.compressor.average(total, inner, peers)
        state["compressor"], state["residual"] = inner, residual
        if old is None or not with_residual:
            return mean, residual if with_residual else []
        return mean, [torch.sub(new, rest, alpha=self.decay) for new, rest in zip(residual, old, strict=True)]
