"""Low-rank averaging by power iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isthmus.compress.base import Compressor
from isthmus.compress.cast import Cast
from isthmus.core.types import Peers, State, Tensors, UserError


@dataclass(frozen=True)
class LowRank:
    """The mean of matrices A (n x m) as P Q^T, one power iteration a sync (PowerSGD, arXiv 1905.13727, algorithm 1).

    P = orthogonalised mean of A Q, with Q from the last sync; then Q = mean of A^T P. The factors of all matrices
    are averaged together, through any compressor: two rounds. More than two dimensions are viewed as
    [first, rest]; what is not a matrix, or does not shrink, is averaged by `bypass`.

    What a lossy factor compressor does not send of A^T P stays in the residual, so the mean of what was sent is
    exact. Workers agree bit for bit where their matrix products do: on machines of one kind.

    Attributes:
        rank: columns of P and Q.
        factors: compressor of both factors (DiLoCoX, arXiv 2506.21263: `Quantize(4)`).
        bypass: compressor of everything else.
    """

    rank: int
    factors: Compressor = field(default_factory=Cast)
    bypass: Compressor = field(default_factory=lambda: Cast("float16"))

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"low_rank: rank {self.rank} must be at least 1")

    @property
    def replicated(self) -> bool:
        """Whether both compressors inside are."""
        return self.factors.replicated and self.bypass.replicated

    def average(self, local: Tensors, state: State, peers: Peers) -> tuple[Tensors, Tensors]:
        """Mean and residual; see `Compressor.average`."""
        shrinks = [self._shrinks(tensor) for tensor in local]
        matrices = [t.float().reshape(len(t), -1) for t, small in zip(local, shrinks, strict=True) if small]
        others = [tensor for tensor, small in zip(local, shrinks, strict=True) if not small]
        bypass_state = dict(state.get("bypass", {}))
        low_rank = self._power_iteration(matrices, state, peers) if matrices else ([], [])
        dense = self.bypass.average(others, bypass_state, peers) if others else ([], [])
        state["bypass"] = bypass_state
        mean, residual = (_interleave(shrinks, small, rest, local) for small, rest in zip(low_rank, dense, strict=True))
        return mean, residual

    def _shrinks(self, tensor: torch.Tensor) -> bool:
        if tensor.ndim < 2 or tensor.numel() == 0:
            return False
        return self.rank * (len(tensor) + tensor.numel() // len(tensor)) < tensor.numel()

    def _power_iteration(self, matrices: Tensors, state: State, peers: Peers) -> tuple[Tensors, Tensors]:
        """Mean and residual of matrices; replaces the warm start and the factor compressors' state."""
        p_state, q_state = dict(state.get("p", {})), dict(state.get("q", {}))
        start = self._warm_start(matrices, state)
        p_mean, _ = self.factors.average([a @ q for a, q in zip(matrices, start, strict=True)], p_state, peers)
        p_factors = [_orthogonalise(p) for p in p_mean]
        own = [a.T @ p for a, p in zip(matrices, p_factors, strict=True)]
        q_mean, q_unsent = self.factors.average(own, q_state, peers)
        mean = [p @ q.T for p, q in zip(p_factors, q_mean, strict=True)]
        sent = [q - unsent for q, unsent in zip(own, q_unsent, strict=True)]
        residual = [torch.addmm(a, p, q.T, alpha=-1) for a, p, q in zip(matrices, p_factors, sent, strict=True)]
        state.update(p=p_state, q=q_state, start=[_orthogonalise(q) for q in q_mean])
        return mean, residual

    def _warm_start(self, matrices: Tensors, state: State) -> Tensors:
        """The last sync's Q, or random columns, equal on all workers, where rank or shape changed."""
        old = state.get("start", [])
        if [q.shape for q in old] == [(a.shape[1], self.rank) for a in matrices]:
            return list(old)
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(a.shape[1], self.rank, generator=generator).to(a.device) for a in matrices]


def _orthogonalise(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns with the same span; arbitrary ones where columns are zero."""
    q: torch.Tensor = torch.linalg.qr(columns).Q
    return q


def _interleave(is_first: list[bool], first: Tensors, second: Tensors, like: Tensors) -> Tensors:
    """Merge two lists back into the order of `like`, and into its shapes."""
    from_first, from_second = iter(first), iter(second)
    merged = [next(from_first if choice else from_second) for choice in is_first]
    return [tensor.view(original.shape) for tensor, original in zip(merged, like, strict=True)]
