"""The outer state: all that the method remembers, in one object with one state dict."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from isthmus.core import Fragment, State, SyncSchedule, Tensors
from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.outer.anchor import adopt_anchors, anchors
from isthmus.outer.former_names import with_present_names
from isthmus.outer.in_flight import Sync, averaged_buffers, copy_dicts, empty_outcome, pseudo_gradient, zeros
from isthmus.outer.merge import Merge
from isthmus.outer.offload import Offload, Offloader
from isthmus.outer.outer_step import OuterStep
from isthmus.outer.rollback import Named, Rollback, Rollbacks
from isthmus.outer.shared_view import shared_view
from isthmus.transport.base import ElasticPart, ReplicatedState, TransportError

Phase = Literal["training", "finishing", "averaging", "finished"]
OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 0.5  # a sync that finds no peers for so long may wait for the very worker that asks for the state
_MAX_COPIES = 9  # anchors and outer optimizer, twice in a rollback, means in flight: what a snapshot may hold
_MAX_OTHER_BYTES = 2**26


class OuterState:
    """Fragments with their anchors, the outer optimizer, syncs in flight and counters: all that a checkpoint holds.

    The training thread alone changes it, and holds `lock` meanwhile, so that any other thread can copy it for a worker
    that joins (`shared_state`). Its arguments are those of `OuterLoop`; `elastic` is the transport's.

    Attributes:
        inner_steps: steps of the schedule taken.
        outer_steps: syncs sent, over all fragments.
        phase: "training", then at the end of the run "finishing" what is in flight, "averaging" the rest, "finished".
        in_flight: by the index of its fragment.
        gradient_state: what guard and compressor remember of the gradients that were averaged.
        elastic_state: what an elastic world remembered after the last finished sync; empty in a static world.
    """

    def __init__(
        self,
        fragments: list[Fragment],
        schedule: SyncSchedule,
        outer_optimizer: OuterOptimizer,
        merge: Merge,
        offload: Offload,
        elastic: ElasticPart | None = None,
        rollback: Rollback | None = None,
    ) -> None:
        self.fragments, self.merge, self.elastic = fragments, merge, elastic
        self.schedule = AdaptiveSchedule(schedule)
        self.outer_optimizer = outer_optimizer(anchors(fragments))
        self.rollbacks = Rollbacks(rollback, fragments, self.outer_optimizer)
        self.offload = Offloader(offload, fragments, self.outer_optimizer)
        self._outer_step = OuterStep(merge, self.outer_optimizer, self.offload)
        self.inner_steps = self.outer_steps = 0
        self.phase: Phase = "training"
        self.in_flight: dict[int, Sync] = {}
        self.gradient_state: State = {}
        self.elastic_state: State = {} if elastic is None else elastic.state_dict()
        self.lock = threading.Lock()

    @property
    def _replicated_state(self) -> ReplicatedState | None:
        return None if self.elastic is None else self.elastic.replicated_state

    @property
    def plain_lr(self) -> float | None:
        """The learning rate of plain SGD, in the synchronous start and at the very end; None: the optimizer's turn."""
        if self.phase == "training" and self.schedule.warm(self.inner_steps):
            return self.schedule.planned.warm_start_lr
        return 1.0 if self.phase == "averaging" else None

    @property
    def max_snapshot_bytes(self) -> int:
        """The most that a snapshot of these fragments may take."""
        return _MAX_COPIES * 4 * sum(anchor.numel() for anchor in anchors(self.fragments)) + _MAX_OTHER_BYTES

    def propose(self, index: int) -> Any:
        """Return what the replicated state proposes; it moves once a round, with the last fragment."""
        last = index == len(self.fragments) - 1
        return self._replicated_state.propose() if last and self._replicated_state else None

    def note_start(self) -> None:
        """Take note that all have met, and agree: what they remember of that is shared with whoever comes now."""
        with self.lock:
            self.elastic_state = {} if self.elastic is None else self.elastic.state_dict()
            self.apply_proposals()

    def apply_proposals(self) -> None:
        """Go by the replicated state as it was committed last."""
        if self._replicated_state:
            self._replicated_state.apply()

    def prefetch(self) -> None:
        """Begin to fetch what the next step needs, if it finishes or captures a fragment, and free what it does not."""
        self.offload.free()
        finishing = self.schedule.finishes(self.inner_steps + 1)
        for index in [*finishing, *self.schedule.begins(self.inner_steps + 1)][:1]:
            more = self._outer_step.reads(self.in_flight.get(index))
            self.offload.prefetch(self.fragments[index], index in finishing, more)

    def capture(self, index: int) -> Sync:
        """Take the pseudo-gradient of a fragment; nothing that is on its way already counts twice."""
        self.offload.free(wait=True)
        fragment, before = self.fragments[index], self.in_flight.get(index)
        own = pseudo_gradient(fragment, self.offload)
        if before and before.held:
            torch._foreach_sub_(own, self.offload.get(before.pseudo_gradient), alpha=before.held)
        planned = self.schedule.planned
        full_delay = planned.overlap_steps == planned.local_steps and not self.schedule.warm(self.inner_steps)
        held = self.merge.kept if full_delay else 1.0  # at full delay the sync before this one finishes now, too
        num_steps, fragment.num_steps = fragment.num_steps, 0
        return Sync(index, own, held, self.propose(index), averaged_buffers(fragment), num_steps)

    def capture_rest(self) -> list[Sync]:
        """Capture, at the end of the run, what the last step has not captured."""
        rest = set(range(len(self.fragments))) - set(self.schedule.begins(self.inner_steps))
        return [self.capture(index) for index in sorted(rest)] if self.inner_steps else []

    def finish(self, index: int, captured: list[Sync], num_workers: int) -> None:
        """Finish a fragment's sync: take its outer step or, where it was refused, keep its progress for the next one.

        Nothing is in flight of it where the sync is the empty one before the first; `captured` is what is sent next.
        """
        sync = self.in_flight.pop(index, None)
        outcome = sync.result if sync else empty_outcome(self.fragments[index], self.elastic_state, num_workers)
        newer = next((each for each in captured if each.fragment == index), None)
        self.elastic_state = outcome.elastic_state
        if index == len(self.fragments) - 1:
            self.apply_proposals()
        if sync is not None and sync.void:
            return
        if outcome.restored:
            self._go_back(outcome.restored, captured)
        elif sync is None or outcome.report.committed:
            self.schedule.message_fraction = outcome.report.message_fraction
            closing = self.phase == "finishing"
            self._outer_step.take(self.fragments[index], sync, outcome, newer, self.plain_lr, closing)
        elif not sync.excluded:
            self._outer_step.refuse(self.fragments[index], sync, newer)
        if sync and sync.excluded:  # bad values of one fragment have spread to the others
            for pending in (*self.in_flight.values(), *captured):
                pending.held = 0.0
            self._forget_progress()
            if self._replicated_state:
                self._replicated_state.roll_back()

    def count_inner_step(self) -> None:
        """Count one inner step of this worker in all fragments."""
        for fragment in self.fragments:
            fragment.num_steps += 1

    def state_dict(self) -> State:
        """Return everything but the model's own parameters; syncs in flight as what was captured for them."""
        return {
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
            "schedule": self.schedule.state_dict(),
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "elastic": self.elastic_state,
            "fragments": [
                {
                    "anchor": [anchor.detach() for anchor in fragment.anchor],
                    "state": copy_dicts(fragment.state),
                    "version": fragment.version,
                    "num_steps": fragment.num_steps,
                }
                for fragment in self.fragments
            ],
            "in_flight": [sync.state_dict() for sync in self.in_order()],
            "gradient_state": copy_dicts(self.gradient_state),
            **self.rollbacks.state_dict(),
        }

    def load_state_dict(self, state_dict: State) -> list[Sync]:
        """Become what was saved; returns the syncs that were in flight, which have to be sent again."""
        state = with_present_names(state_dict)
        self._load_shared(state)
        self.rollbacks.load_own(state)
        self.gradient_state.clear()
        self.gradient_state.update(state.get("gradient_state", {}))
        self.in_flight = {}
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.state, fragment.num_steps = copy_dicts(saved["state"]), saved.get("num_steps", 0)
        if self.elastic is not None:
            self.elastic.load_state_dict(self.elastic_state)
        self.apply_proposals()
        syncs = [Sync(**saved) for saved in state["in_flight"]]
        for sync in syncs:
            device = self.fragments[sync.fragment].device
            sync.pseudo_gradient = [tensor.to(device) for tensor in sync.pseudo_gradient]
        return syncs

    def shared_state(self, wait_seconds: float) -> State:
        """Copy all that the workers agree on; may be called on any thread.

        A sync in flight comes with its mean; one for which training waits is finished first. One that still looks for
        workers after a while comes without: perhaps it waits for the very worker that asks, which is to send it too.

        Raises:
            TransportError: a sync on its way was not decided within that time.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + wait_seconds:
            with self.lock:
                undecided = [sync for sync in self.in_flight.values() if sync.outcome and not sync.arrived]
                about_to_finish = bool(self.in_flight) and not undecided and self.schedule.blocking(self.inner_steps)
                patient = time.monotonic() < begin + _PATIENCE_SECONDS
                have_peers = any(sync.has_peers for sync in undecided)
                if not (undecided or about_to_finish) or not (have_peers or patient):
                    return copy.deepcopy(shared_view(self.state_dict(), self.phase, self.fragments, self.in_order()))
            time.sleep(_POLL_SECONDS)
        raise TransportError(f"a sync was not decided within {wait_seconds:g} s: the state cannot be given away yet")

    @torch.no_grad()
    def adopt(self, shared: State, now: float) -> list[Sync]:
        """Take over the others' shared state, and keep the progress that it does not hold yet.

        Returns:
            Syncs that are still looking for workers: to be sent again, with nothing of this worker in them.
        """
        assert self.elastic is not None, "in a static world nobody is ever behind"
        self.elastic.load_state_dict(shared["elastic_decided"])
        contributed = any(self.elastic.contributed_to(sync.outer_step) for sync in self.in_flight.values())
        keeps = self._replicated_state is None or self._replicated_state.reconcile(contributed)
        if shared.get("num_rollbacks", 0) != self.rollbacks.number:  # progress from anchors that all have given up
            keeps = False
        progress = [
            self.offload.put(self._progress(index, self.elastic) if keeps else zeros(fragment))
            for index, fragment in enumerate(self.fragments)
        ]
        self.phase = shared["phase"]
        self._load_shared(shared)
        for fragment, own, state in zip(self.fragments, progress, shared["fragments"], strict=True):
            fragment.num_steps = fragment.num_steps if keeps else 0
            for param, anchor, part in zip(fragment.params, fragment.anchor, own, strict=True):
                param.copy_(self.offload.get(anchor.detach()) - self.offload.get(part))
            for buffer, value in zip(fragment.shared_buffers, state["buffers"], strict=True):
                buffer.copy_(value)
        syncs = [Sync.from_shared(state, self.fragments[state["fragment"]], now) for state in shared["in_flight"]]
        self.in_flight = {sync.fragment: sync for sync in syncs if sync.arrived}
        return [sync for sync in syncs if not sync.arrived]

    def _go_back(self, restored: Named, captured: list[Sync]) -> None:
        """Go back to the last good anchors; the samples read since then are not read again."""
        self.offload.put_all()
        self.rollbacks.go_back(restored)
        for pending in (*self.in_flight.values(), *captured):
            pending.void, pending.held = True, 0.0
        self._forget_progress()

    def _forget_progress(self) -> None:
        """Go on from the anchors, as if this worker had not trained since."""
        adopt_anchors(self.fragments)
        for fragment in self.fragments:
            fragment.num_steps = 0

    def _load_shared(self, state: State) -> None:
        """Load what the state dict of a worker and the shared state have in common."""
        self.offload.put_all()
        self.inner_steps, self.outer_steps = state["inner_steps"], state["outer_steps"]
        self.schedule.load_state_dict(state["schedule"])
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        self.elastic_state = state["elastic"]
        self.rollbacks.load_shared(state)
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.version = saved["version"]
            for anchor, value in zip(fragment.anchor, saved["anchor"], strict=True):
                anchor.copy_(value)

    def _progress(self, index: int, elastic: ElasticPart) -> Tensors:
        """Return, as a pseudo-gradient, what this worker did to a fragment and the others' state does not hold."""
        fragment, sync = self.fragments[index], self.in_flight.get(index)
        own = pseudo_gradient(fragment, self.offload)
        if sync is None or sync.void:
            return own
        contributed = elastic.contributed_to(sync.outer_step)
        if contributed and sync.outcome is not None:
            fragment.state = sync.result.compressor_state  # it was sent and counts: so does what was not sent of it
        unheld = (0.0 if contributed else 1.0) - sync.held
        if unheld:
            torch._foreach_add_(own, self.offload.get(sync.pseudo_gradient), alpha=unheld)
        fragment.num_steps += 0 if contributed else sync.num_steps
        return own

    def in_order(self) -> list[Sync]:
        """Return the syncs in flight in the order in which they were sent."""
        return sorted(self.in_flight.values(), key=lambda sync: sync.outer_step)
