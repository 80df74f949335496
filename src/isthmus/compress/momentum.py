"""Shared momentum: workers keep momentum of their own and share only its compressed part (DCT-momentum)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from isthmus.compress.base import Compressor
from isthmus.core.types import Peers, State, Tensors


@dataclass(frozen=True)
class SharedMomentum(Compressor):
    """The literal update of arXiv 2510.03371, reconstructed from its abstract and its authors' repository.

    With g the pseudo-gradient of this worker, m its momentum and q the part of m that its message holds::

        m <- decay * m + g
        m <- m - q + mean(q)
        result = g + decay * m

    g and the unsent part of m are this worker's own and reach the result, so results, and with them the anchors,
    differ between workers (`replicated` is False). The variant in which only the shared mean touches the anchor is
    `ErrorFeedback(DCT(TopK(...)))` under an outer Nesterov optimizer.
    """

    compressor: Compressor  # any compressor, `DCT(TopK(...))` in the paper
    decay: float = 0.95  # of the momentum
    replicated: ClassVar[bool] = False  # every worker's result holds its own pseudo-gradient

    @override
    def message_fraction(self, state: State) -> float:
        return self.compressor.message_fraction(state.get("compressor", {}))

    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        """Return this worker's outer gradient, and a residual of zero: the momentum remembers what was not sent."""
        gradient = [tensor.float() for tensor in local]
        momentum = state.get("momentum", [torch.zeros_like(tensor) for tensor in gradient])
        momentum = [torch.add(g, m, alpha=self.decay) for g, m in zip(gradient, momentum, strict=True)]
        inner: State = dict(state.get("compressor", {}))
        mean, unsent = self.compressor.average(momentum, inner, peers)
        momentum = [rest + shared for rest, shared in zip(unsent, mean, strict=True)]
        state["compressor"], state["momentum"] = inner, momentum
        result = [torch.add(g, m, alpha=self.decay) for g, m in zip(gradient, momentum, strict=True)]
        remembered = gradient if with_residual else []
        return result, [torch.zeros((), device=g.device).expand(g.shape) for g in remembered]
