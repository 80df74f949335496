"""Robust means: what a minority of bad workers sends moves the result only so far.

Messages are seen one by one. Dense ones take two shots, as for a plain mean: everybody sends part i of its message to
the owner of part i, owners combine what came and send everybody the encoded result. What their second encoding loses is
not fed back. Sparse ones go to everybody, and all combine them alike. Each owner measures its part of every message,
and the parts' norms are added up: one that is not finite is left out, and a rule that looks at whole messages sees them
as they arrived, not as their senders say.

That defends against bad *values* (a run that diverged, broken memory), not against a changed program: an owner decides
its own part of the result. Nothing is remembered between syncs, so nothing can be poisoned for longer than one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, cast

import torch
from typing_extensions import override

from isthmus.compress.base import Codec, Compressor, NotFinite, gather_parts, part_sizes, slices
from isthmus.compress.cast import Cast
from isthmus.core.types import Peers, State, Tensors, UserError

Measure = Callable[[Tensors], torch.Tensor]  # n vectors as `combine` has them -> norms of the whole ones, [n] float64


@dataclass(frozen=True)
class RobustMean(Compressor):
    """A mean that bad workers move only so far."""

    codec: Codec = field(default_factory=Cast)  # writes the messages; where a sparse one is silent it says zero
    replicated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UserError(
                f"a robust mean needs a codec (cast, quantize, float4, topk or dct): {self.codec}; around other "
                "compressors set outer.aggregation"
            )

    @override
    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        rows = self.codec.to_rows(local)
        generator = self.codec._generator(state, peers, rows.device)
        residual = torch.empty_like(rows) if with_residual else None
        own = self.codec.encode_message(rows, residual, generator)
        sizes = part_sizes(len(rows), peers.weights)
        gathered = self.codec.sparse
        parts = [[part] for part in own.split_with_sizes(sizes)]
        received = peers.all_gather([own]) if gathered else peers.all_to_all(parts)
        weighted = [rank for rank in range(peers.size) if peers.weights[rank] > 0]
        messages = [self.codec.decode(received[rank][0]) for rank in weighted]
        begin = sum(sizes[: peers.rank]) if gathered else 0

        def measure(vectors: Tensors) -> torch.Tensor:
            return _whole_norms([vector[begin : begin + sizes[peers.rank]] for vector in vectors], peers)

        norms = measure(messages)
        finite = norms.isfinite()
        if not finite.any():
            raise NotFinite(weighted)
        messages = [message for message, good in zip(messages, finite, strict=True) if good]
        weights = torch.tensor([peers.weights[rank] for rank in weighted], dtype=torch.float64)[finite]
        combined = self.combine(messages, norms[finite], weights / weights.sum(), measure)
        if not gathered:
            combined = self.codec.decode(gather_parts(self.codec.encode(combined, generator), sizes, peers))
        mean = self.codec.from_rows(combined, local)
        return mean, [] if residual is None else self.codec.from_rows(residual, local)

    def combine(self, messages: Tensors, norms: torch.Tensor, weights: torch.Tensor, measure: Measure) -> torch.Tensor:
        """Return this owner's part of the mean, or all of it where messages are gathered.

        Workers that combine the same messages must get the same bits on every kind of machine: no sums but those of
        `measure`, and no product fused with a sum.

        Args:
            messages: the same part of n workers' messages, [rows, row] float32 each, finite; may be overwritten.
            norms: [n] float64 of the whole messages.
            weights: [n] float64, positive, summing to 1.
            measure: norms of n other whole vectors; all workers call it equally often.

        Returns:
            [rows, row] float32.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Median(RobustMean):
    """The middle of all workers' values, coordinate by coordinate (Yin et al. 2018, arXiv 1803.01498, option I).

    Fewer than half of the workers cannot move a coordinate out of the others' range. Of an even number the two in
    the middle are averaged. Weights are ignored, but for 0.
    """

    @override
    def combine(self, messages: Tensors, norms: torch.Tensor, weights: torch.Tensor, measure: Measure) -> torch.Tensor:
        return _trimmed_mean(messages, len(messages))


@dataclass(frozen=True)
class TrimmedMean(RobustMean):
    """The mean without each coordinate's `trim` largest and smallest values (Yin et al. 2018, option II).

    Weights are ignored, but for 0. With `2 * trim` workers or fewer it is the median.
    """

    # how many bad workers are expected; the price rises with it even if there are none (arXiv 2510.04432)
    trim: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trim < 0:
            raise UserError(f"trimmed_mean: trim {self.trim} must not be negative")

    @override
    def combine(self, messages: Tensors, norms: torch.Tensor, weights: torch.Tensor, measure: Measure) -> torch.Tensor:
        return _trimmed_mean(messages, self.trim)


@dataclass(frozen=True)
class NormClip(RobustMean):
    """The weighted mean of messages no longer than `factor` times their median norm (Covenant-72B, arXiv 2603.08163).

    The norm is that of the whole fragment, not of a tensor. One worker of share w moves the result by at most
    2 * w * factor * median; it does move it, as much as an honest one.
    """

    factor: float = 1.0  # multiple of the median norm; infinity: the plain mean

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 0:
            raise UserError(f"norm_clip: factor {self.factor} must be positive")

    @override
    def combine(self, messages: Tensors, norms: torch.Tensor, weights: torch.Tensor, measure: Measure) -> torch.Tensor:
        return _weighted_sum(messages, weights * _clip_scales(norms, self.factor))


@dataclass(frozen=True)
class CentredClip(RobustMean):
    """v <- v + weighted mean of (message - v), no difference longer than a radius, a few times over.

    Karimireddy et al. 2021 (arXiv 2012.10333), algorithm 2. There v begins at the last aggregate and the radius is a
    constant; here v begins at the coordinate median of this sync and the radius is `factor` times the median
    distance from v, so nothing is stored that a bad sync could spoil, and the scale of the gradients does not matter.
    """

    factor: float = 1.0  # radius, as a multiple of the median distance; infinity: the plain mean after one iteration
    iterations: int = 3  # how often v moves

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 0 or self.iterations < 1:
            raise UserError(
                f"centred_clip: factor {self.factor} must be positive and iterations {self.iterations} at least 1"
            )

    @override
    def combine(self, messages: Tensors, norms: torch.Tensor, weights: torch.Tensor, measure: Measure) -> torch.Tensor:
        centre = _trimmed_mean([message.clone() for message in messages], len(messages))
        for _ in range(self.iterations):
            scales = weights * _clip_scales(measure([message - centre for message in messages]), self.factor)
            centre = centre * (1 - math.fsum(scales.tolist())) + _weighted_sum(messages, scales)
        return centre


def weighted_mean(codec: Codec) -> Compressor:
    """Return the codec, which takes the weighted mean by itself."""
    return codec


def aggregate(compressor: Compressor, robust: Callable[[Codec], Compressor]) -> Compressor:
    """Return the compressor with a robust mean in the place of every codec's own; see `RobustMean`.

    Wrappers stay around it, such as error feedback; of low rank both factors are combined robustly, one after the
    other.

    Raises:
        UserError: some part of it takes a mean of its own.
    """
    if isinstance(compressor, Codec):
        return robust(compressor)
    inside = _compressors_in(compressor)
    if not inside or isinstance(compressor, RobustMean):
        raise UserError(
            f"outer.aggregation: {compressor} is no codec, and holds none whose mean could be replaced: choose "
            "aggregation mean, or another compressor"
        )
    changed: Any = compressor
    return cast(Compressor, replace(changed, **{name: aggregate(part, robust) for name, part in inside.items()}))


def _compressors_in(compressor: Compressor) -> dict[str, Compressor]:
    """Return the fields of a compressor that are compressors."""
    if not is_dataclass(compressor):
        return {}
    values = {each.name: getattr(compressor, each.name) for each in fields(compressor)}
    return {name: value for name, value in values.items() if callable(getattr(value, "average", None))}


def _whole_norms(parts: Tensors, peers: Peers) -> torch.Tensor:
    """Return the norms of n vectors of which every owner has a part, [n] float64, the same on all peers.

    Infinite or NaN where a vector is not finite, or too long to be squared in float32.
    """
    own = torch.stack([torch.linalg.vector_norm(part) for part in parts]).double().square().cpu()
    return torch.stack([theirs for (theirs,) in peers.all_gather([own])]).sum(0).sqrt()


def _clip_scales(norms: torch.Tensor, factor: float) -> torch.Tensor:
    """Return by how much each vector shrinks so that none is longer than `factor` times the lower median norm."""
    limit = factor * norms.median() if factor < torch.inf else norms.new_tensor(torch.inf)
    return torch.where(norms > limit, limit / norms, 1.0)


def _weighted_sum(vectors: Tensors, weights: torch.Tensor) -> torch.Tensor:
    total = vectors[0] * float(weights[0])
    for vector, weight in zip(vectors[1:], weights[1:].tolist(), strict=True):
        total += vector * weight
    return total


def _trimmed_mean(messages: Tensors, trim: int) -> torch.Tensor:
    """Return the mean without the `trim` extremes on each side, as far as any are left; overwrites the messages."""
    trim = min(trim, (len(messages) - 1) // 2)
    if trim:
        for part in zip(*(slices(message) for message in messages), strict=True):
            _sort(part)
    kept = messages[trim : len(messages) - trim]
    return _weighted_sum(kept, torch.full((len(kept),), 1 / len(kept), dtype=torch.float64))


def _sort(rows: tuple[torch.Tensor, ...]) -> None:
    """Sort every coordinate over a few tensors, in place: odd-even transposition, ten times as fast as torch.sort."""
    for turn in range(len(rows)):
        for low, high in zip(rows[turn % 2 :: 2], rows[turn % 2 + 1 :: 2], strict=False):
            smaller = torch.minimum(low, high)
            torch.maximum(low, high, out=high)
            low.copy_(smaller)
