"""How the mean of a sync becomes the new anchor, and where the local parameters go on from."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor
from typing_extensions import override

from isthmus.compress.base import Compressor
from isthmus.core import Fragment, SyncSchedule, UserError
from isthmus.transport.base import Transport


class Merge(Protocol):
    """A rule applied tensor by tensor when a sync is finished. All tensors of one call share one shape, float32."""

    replicated: ClassVar[bool]  # whether anchors stay equal on all workers

    @property
    def kept(self) -> float:
        """Share of the progress made while a sync was in flight that is in the local values after `resume`."""
        ...

    def outer_gradient(self, mean: Tensor, own_then: Tensor, own_now: Tensor, share: float) -> Tensor:
        """Return what the outer optimizer receives as gradient.

        Args:
            mean: mean pseudo-gradient of the sync that is being finished.
            own_then: this worker's pseudo-gradient in it.
            own_now: this worker's pseudo-gradient of today (anchor - params).
            share: this worker's weight in the mean.
        """
        ...

    def resume(self, now: Tensor, then: Tensor, anchor: Tensor) -> Tensor:
        """Return the new local values, given those of now, those at the capture, and the new anchor."""
        ...


@dataclass(frozen=True)
class Replace(Merge):
    """Adopt the new anchor (DiLoCo, arXiv 2311.08105, algorithm 1; with overlap, the plain delay)."""

    replicated: ClassVar[bool] = True

    @property
    @override
    def kept(self) -> float:
        return 0.0

    @override
    def outer_gradient(self, mean: Tensor, own_then: Tensor, own_now: Tensor, share: float) -> Tensor:
        return mean

    @override
    def resume(self, now: Tensor, then: Tensor, anchor: Tensor) -> Tensor:
        return anchor


@dataclass(frozen=True)
class Mix(Replace):
    """Keep `alpha` of the local values (Streaming DiLoCo, 2501.18512, algorithm 2): 1 never adopts, 0 replaces."""

    alpha: float = 0.5

    @override
    def resume(self, now: Tensor, then: Tensor, anchor: Tensor) -> Tensor:
        if self.alpha < 0.5:
            return anchor + self.alpha * (now - anchor)
        return now - (now - anchor) * (1 - self.alpha)


@dataclass(frozen=True)
class Eager(Replace):
    """Swap this worker's stale share of the mean for its fresh one (Eager Updates, arXiv 2502.12996, section 3).

    Anchors differ between workers by at most a share of one pseudo-gradient. The difference does not accumulate, as
    what is taken away is what was given: the pseudo-gradient itself, not what a compressor left of it for the others.
    """

    replicated: ClassVar[bool] = False

    @override
    def outer_gradient(self, mean: Tensor, own_then: Tensor, own_now: Tensor, share: float) -> Tensor:
        return mean + share * (own_now - own_then)


@dataclass(frozen=True)
class KeepProgress(Replace):
    """Adopt the new anchor and keep progress made while the sync was in flight (all: LOSCAR-SGD, arXiv 2605.20866).

    A worker knows what it learnt itself before it knows what all have learnt. It best goes on from its own guess of
    that: `kept` of its own, as the rest is noise of its batches (docs/learning.md).
    """

    kept: float = 1.0  # share of that progress, from 0 (the plain delay) to 1

    def __post_init__(self) -> None:
        if not 0 <= self.kept <= 1:
            raise UserError(f"kept of merge keep_progress should be from 0 to 1, got {self.kept}")

    @override
    def resume(self, now: Tensor, then: Tensor, anchor: Tensor) -> Tensor:
        return anchor + self.kept * (now - then)


def check_parts(
    fragments: list[Fragment], schedule: SyncSchedule, compressor: Compressor, transport: Transport, merge: Merge
) -> None:
    """Raise a `UserError` where the parts of an outer loop do not go together."""
    if len(fragments) != schedule.num_fragments:
        raise UserError(
            f"the model is cut into {len(fragments)} fragments, the schedule expects {schedule.num_fragments}"
        )
    if isinstance(merge, Mix) and schedule.overlap_steps == schedule.local_steps:
        raise UserError("merge mix needs overlap_steps < local_steps; for a full delay use eager or keep_progress")
    if schedule.overlap_steps and not transport.limits.safe_to_overlap:
        raise UserError("this transport cannot run beside training: set overlap_steps to 0 or use the gloo backend")
    if transport.limits.elastic and not (merge.replicated and compressor.replicated):
        raise UserError(
            "workers that come and go need equal anchors; merge eager and compressor shared_momentum give every worker "
            "its own: use merge keep_progress, another compressor, or the transport torch_dist"
        )
