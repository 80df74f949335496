"""Syncs in flight: captured on the training thread, averaged on the communication thread, then finished."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from isthmus.core import Fragment, State, SyncReport, Tensors
from isthmus.core.streams import hand_over
from isthmus.outer.offload import Offloader
from isthmus.outer.rollback import Named, Offer

_SAVED = (
    *("fragment", "pseudo_gradient", "held", "proposal", "buffers", "num_steps"),
    *("asks_rollback", "void", "outer_step"),
)


@dataclass
class Sync:
    """One fragment's round, from capture to finish."""

    fragment: int  # index of the fragment
    pseudo_gradient: Tensors  # this worker's, float32, in the shapes of the fragment's parameters
    held: float  # share of this progress that the local parameters hold while it is in flight
    proposal: Any = None  # of this worker's replicated state, made at the capture; None where the sync does not move it
    buffers: Tensors = field(default_factory=list)  # float32 copies of the buffers that are averaged
    num_steps: int = 0  # inner steps in the pseudo-gradient
    asks_rollback: bool = False  # this worker's evaluation had exploded when it was sent
    void: bool = False  # captured before a rollback: nothing of it counts
    excluded: bool = False  # the guard left this worker's contribution out, and nothing of it is kept
    outer_step: int = -1  # number of the sync, given when it is sent
    offer: Offer | None = None  # what this worker brings to a rollback; None where runs never go back
    outcome: Future[Outcome] | None = field(default=None, repr=False)  # what the communication thread brings back
    waited_seconds: float = 0.0  # how long the training thread waited for the outcome
    has_peers: bool = False  # a quorum was formed, and the collectives are not done yet

    @property
    def result(self) -> Outcome:
        """The outcome, for the calling thread's stream to use; waits until it is there."""
        assert self.outcome is not None, "the sync was not sent"
        outcome = self.outcome.result()
        hand_over([*outcome.mean, *self.pseudo_gradient])
        return outcome

    @property
    def report(self) -> SyncReport:
        """The report of the outcome, with the seconds during which training went on."""
        report = self.result.report
        return replace(report, hidden_seconds=max(0.0, report.seconds - self.waited_seconds))

    @property
    def arrived(self) -> bool:
        """Whether the outcome is there."""
        return self.outcome is not None and self.outcome.done()

    def state_dict(self) -> State:
        """Return what a checkpoint holds of it: it is sent again when the run goes on."""
        return {name: getattr(self, name) for name in _SAVED}

    def shared(self, elastic_state: State, message_fraction: float) -> State:
        """Return what a worker that joins may know of this sync; undecided ones have the last `message_fraction`."""
        outcome = self.result if self.arrived else None
        return {
            "fragment": self.fragment,
            "outer_step": self.outer_step,
            "elastic": elastic_state,
            "arrived": outcome is not None,
            "mean": outcome.mean if outcome else [],
            "buffers": outcome.buffers if outcome else [],
            "restored": outcome.restored if outcome else {},
            "void": self.void,
            "message_fraction": outcome.report.message_fraction if outcome else message_fraction,
        }

    @classmethod
    def from_shared(cls, state: State, fragment: Fragment, now: float) -> Sync:
        """Return a sync of the others, to which this worker gave nothing; sent again unless it has arrived."""
        nothing = [torch.zeros_like(param, dtype=torch.float32) for param in fragment.params]
        number, buffers = state["outer_step"], averaged_buffers(fragment)
        sync = cls(state["fragment"], nothing, 1.0, buffers=buffers, void=state["void"], outer_step=number)
        if state["arrived"]:
            outcome = without_contribution(fragment, state["mean"], state["elastic"], number, state["message_fraction"])
            outcome.end, outcome.buffers, sync.outcome = now, state["buffers"], Future()
            outcome.restored = state["restored"]
            sync.outcome.set_result(outcome)
        return sync


@dataclass
class Outcome:
    """The result of a sync, as the communication thread brings it back."""

    report: SyncReport  # what the sync did
    mean: Tensors  # mean pseudo-gradient; empty when the sync was refused, or all go back
    compressor_state: State  # the compressor's memory after this sync
    weight: float = 0.0  # this worker's share in the mean
    end: float = 0.0  # the transport's time at which the sync was decided
    # what an elastic world remembers after this sync; empty in a static one
    elastic_state: State = field(default_factory=dict)
    undecided: bool = False  # this worker could not see whether the others committed
    behind: bool = False  # the others have committed without this worker
    relative_speed: float = 1.0  # this worker's share of the fastest worker's speed, in (0, 1]
    final: bool = False  # trying again is useless
    buffers: Tensors = field(default_factory=list)  # means of the buffers that are averaged
    restored: Named = field(default_factory=dict)  # what all go back to; empty where they do not


def without_contribution(
    fragment: Fragment, mean: Tensors, elastic_state: State, step: int = -1, message_fraction: float = 1.0
) -> Outcome:
    """Return the outcome of a sync to which this worker gave nothing; without a `mean` the others refused it."""
    reason = "" if mean else "the other workers refused this sync before this worker joined"
    options: dict[str, Any] = {"message_fraction": message_fraction, "reason": reason}
    report = SyncReport(step, fragment.name, bool(mean), norm=0.0, cosine=0.0, **options)
    return Outcome(report, mean, fragment.state, elastic_state=elastic_state)


def empty_outcome(fragment: Fragment, elastic_state: State, num_workers: int) -> Outcome:
    """Return the outcome of the sync before the first one: nobody had anything to send."""
    outcome = without_contribution(fragment, zeros(fragment), elastic_state)
    outcome.weight = 1 / num_workers
    return outcome


def pseudo_gradient(fragment: Fragment, offload: Offloader) -> Tensors:
    """Return anchor - parameters, float32, beside the parameters."""
    pairs = zip(fragment.anchor, fragment.params, strict=True)
    return [offload.get(anchor.detach()) - param.float() for anchor, param in pairs]


def averaged_buffers(fragment: Fragment) -> Tensors:
    """Return float32 copies of the buffers that are averaged."""
    return [buffer.detach().to(torch.float32, copy=True) for buffer in fragment.averaged]


def zeros(fragment: Fragment) -> Tensors:
    """Return zeros in the shapes of the fragment, which take no memory."""
    return [torch.zeros((), device=param.device).expand(param.shape) for param in fragment.params]


def copy_dicts(state: State) -> State:
    """Return a copy of nested dicts that shares their tensors."""
    return {key: copy_dicts(value) if isinstance(value, dict) else value for key, value in state.items()}
