"""Low-rank averaging by power iteration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch

from isthmus.compress.base import Compressor, is_finite
from isthmus.compress.cast import Cast
from isthmus.core.types import Peers, State, Tensors, UserError

_HEADROOM = 1.25  # effective ranks cannot exceed the rank: without it the rank would only fall
_ROUNDING = 0.01  # an effective rank of 4 may come out a little above
_LEVELS = 64  # in which workers agree on a rank that is a share


@dataclass(frozen=True)
class LowRank:
    """The mean of matrices A (n x m) as P Q^T, one power iteration a sync (PowerSGD, arXiv 1905.13727, algorithm 1).

    P = orthogonalised mean of A Q, with Q from the last sync; then Q = mean of A^T P. The factors of all matrices
    are averaged together, through any compressor: two rounds. More than two dimensions are viewed as
    [first, rest]; what is not a matrix, or does not shrink, is averaged by `bypass`.

    The columns of P, which all workers share, span a part of the smaller side: a matrix that is taller than wide is
    turned. So r of min(n, m) directions of each worker's own matrix are sent, noise included. On the larger side they
    were r of max(n, m), and error feedback kept the rest for as many times longer (docs/log.md).

    What a lossy factor compressor does not send of A^T P stays in the residual, so the mean of what was sent is
    exact. Workers agree bit for bit where their matrix products do: on machines of one kind.

    With `window` the rank follows what is worth sending (DiLoCoX, arXiv 2506.21263; reconstructed from the outline that
    a window of effective ranks decides the next rank). After each sync every worker takes the effective rank of the
    mean: exp of the entropy of its squared singular values, averaged over matrices. Before the next sync the workers'
    means over their windows are gathered; the middle one, a quarter more so that the rank can grow again, is the rank
    of that sync: agreed by all, whatever their rounding errors and whenever they joined. A rank that is a share falls
    by the same part for all matrices.
    """

    rank: int | float  # columns of P and Q, at most; below 1: as a share of the smaller side of each matrix
    # compressor of both factors (DiLoCoX, arXiv 2506.21263: `Quantize(4)`)
    factors: Compressor = field(default_factory=Cast)
    bypass: Compressor = field(default_factory=lambda: Cast("float16"))  # compressor of everything else
    window: int = 0  # syncs whose effective ranks count; 0: the rank stays

    def __post_init__(self) -> None:
        if not (0 < self.rank < 1 or (self.rank >= 1 and self.rank == int(self.rank))):
            raise UserError(f"low_rank: rank {self.rank} must be a whole number from 1, or a share between 0 and 1")
        if self.window < 0:
            raise UserError(f"low_rank: window {self.window} must be 0 or more")

    @property
    def replicated(self) -> bool:
        """Whether both compressors inside give every peer the same mean, bit for bit."""
        return self.factors.replicated and self.bypass.replicated

    def message_fraction(self, state: State) -> float:
        """Return the rank of the last sync over the largest rank."""
        level: int = state.get("rank", self._levels)
        return level / self._levels

    @property
    def _levels(self) -> int:
        """In how many steps the rank may fall: by a column, or by a 64th of a share."""
        return int(self.rank) if self.rank >= 1 else _LEVELS

    def _columns(self, shape: Sequence[int], state: State) -> int:
        """Return the rank of a matrix in this sync."""
        level: int = state.get("rank", self._levels)
        return level if self.rank >= 1 else math.ceil(self.rank * min(shape) * level / _LEVELS)

    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        """Return the mean over peers and this worker's residual, as every compressor does."""
        if self.window:
            state["rank"] = self._agree(state, peers)
        shrinks = [self._shrinks(tensor, state) for tensor in local]
        shrinking = [tensor for tensor, small in zip(local, shrinks, strict=True) if small]
        matrices = [_turned(tensor.float().reshape(len(tensor), -1)) for tensor in shrinking]
        others = [tensor for tensor, small in zip(local, shrinks, strict=True) if not small]
        bypass_state = dict(state.get("bypass", {}))
        wide = self._power_iteration(matrices, state, peers, with_residual) if matrices else ([], [])
        low_rank = [[_turned_back(m, t) for m, t in zip(part, shrinking, strict=False)] for part in wide]
        dense = self.bypass.average(others, bypass_state, peers, with_residual) if others else ([], [])
        state["bypass"] = bypass_state
        mean = _interleave(shrinks, low_rank[0], dense[0], local)
        return mean, _interleave(shrinks, low_rank[1], dense[1], local) if with_residual else []

    def _agree(self, state: State, peers: Peers) -> int:
        """Agree with the peers on the rank of this sync."""
        seen: list[float] = state.get("effective_ranks", [])
        own = torch.tensor([sum(seen) / len(seen) if seen else math.nan], dtype=torch.float64)
        everybody = zip(peers.all_gather([own]), peers.weights, strict=True)
        known = [float(mean) for (mean,), weight in everybody if weight > 0 and mean.isfinite()]
        wanted = _HEADROOM * median_low(known) if known else self._levels
        return max(1, min(self._levels, math.ceil(wanted - _ROUNDING)))

    def _shrinks(self, tensor: torch.Tensor, state: State) -> bool:
        if tensor.ndim < 2 or tensor.numel() == 0:
            return False
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        return self._columns((rows, columns), state) * (rows + columns) < tensor.numel()

    def _power_iteration(
        self, matrices: Tensors, state: State, peers: Peers, with_residual: bool
    ) -> tuple[Tensors, Tensors]:
        """Return mean and residual of matrices; replaces the warm start and the factor compressors' state."""
        p_state, q_state = dict(state.get("p", {})), dict(state.get("q", {}))
        start = self._warm_start(matrices, state)
        p_mean, _ = self.factors.average([a @ q for a, q in zip(matrices, start, strict=True)], p_state, peers, False)
        p_factors = [_orthogonalise(p) for p in p_mean]
        own = [a.T @ p for a, p in zip(matrices, p_factors, strict=True)]
        q_mean, q_unsent = self.factors.average(own, q_state, peers, with_residual)
        mean = [p @ q.T for p, q in zip(p_factors, q_mean, strict=True)]
        sent = [q - unsent for q, unsent in zip(own, q_unsent, strict=with_residual)]
        residual = [
            torch.addmm(a, p, q.T, alpha=-1) for a, p, q in zip(matrices, p_factors, sent, strict=with_residual)
        ]
        if self.window:
            turned = [_by_energy(q) for q in q_mean]
            q_mean = [q for q, _ in turned]
            levels = [  # of the largest rank of each
                self._levels * rank / self._columns(matrix.shape, {})
                for matrix, (_, rank) in zip(matrices, turned, strict=True)
            ]
            seen = [*state.get("effective_ranks", []), sum(levels) / len(levels)]
            state["effective_ranks"] = seen[-self.window :]
        state.update(p=p_state, q=q_state, start=[_orthogonalise(q) for q in q_mean])
        return mean, residual

    def _warm_start(self, matrices: Tensors, state: State) -> Tensors:
        """Return the last sync's Q, cut to the rank; random columns, equal on all workers, where there are too few."""
        ranks = [self._columns(matrix.shape, state) for matrix in matrices]
        old = state.get("start", [])
        if [len(q) for q in old] != [a.shape[1] for a in matrices]:
            old = [a.new_empty(a.shape[1], 0) for a in matrices]
        generator = torch.Generator().manual_seed(0)
        starts = list[torch.Tensor]()
        for q, rank in zip(old, ranks, strict=True):
            more = torch.randn(len(q), max(0, rank - q.shape[1]), generator=generator).to(q.device)
            starts.append(torch.cat([q[:, :rank], more], dim=1))
        return starts


def _turned(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix that is at least as wide as tall."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _turned_back(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what `_turned` was given, in its shape."""
    return (matrix.T if len(like) ** 2 > like.numel() else matrix).reshape(like.shape)


def _by_energy(q: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Turn Q, of a mean P Q^T with P orthonormal, so that its columns are in the order of the mean's singular values.

    Returns:
        [m, rank] turned, and the effective rank (Roy and Vetterli 2007; of squared singular values).
    """
    if not is_finite(q):  # the sync will be refused
        return q, math.nan
    energies, turn = torch.linalg.eigh(q.T.double() @ q.double())
    energies = energies.clamp(min=0)
    shares = energies / energies.sum().clamp(min=1e-300)
    return q @ turn.flip(1).to(q.dtype), float(torch.special.entr(shares).sum().exp())


def _orthogonalise(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns with the same span; arbitrary ones where columns are zero."""
    q: torch.Tensor = torch.linalg.qr(columns).Q
    return q


def _interleave(is_first: list[bool], first: Tensors, second: Tensors, like: Tensors) -> Tensors:
    """Merge two lists back into the order of `like`, and into its shapes."""
    from_first, from_second = iter(first), iter(second)
    merged = [next(from_first if choice else from_second) for choice in is_first]
    return [tensor.view(original.shape) for tensor, original in zip(merged, like, strict=True)]
