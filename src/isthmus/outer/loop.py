"""The outer loop: when the syncs of a run begin, arrive and finish."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from isthmus.compress.base import Compressor
from isthmus.core.fragment import Fragment
from isthmus.core.schedule import SyncSchedule
from isthmus.core.streams import hand_over
from isthmus.core.types import SyncReport
from isthmus.outer.anchor import anchors, fingerprint, worker_fingerprint
from isthmus.outer.communication_thread import CommunicationThread
from isthmus.outer.compatibility import check_parts
from isthmus.outer.dynamic_local_steps import DynamicLocalSteps
from isthmus.outer.guard import Guard
from isthmus.outer.in_flight import Outcome, Sync
from isthmus.outer.merge import Merge, Replace
from isthmus.outer.offload import Offload
from isthmus.outer.state import OuterOptimizer, OuterState
from isthmus.outer.sync import Exchange
from isthmus.transport.base import Behind, Transport


class OuterLoop:
    """Syncs a model with its peers: call `step()` after every inner step.

    All workers build it alike and take the same number of inner steps. Nothing (anchor, outer optimizer,
    compressor memory) changes before a sync is committed by everybody. What it remembers is in `state`.

    Args:
        fragments: the model's fragments (`isthmus.core.split_*`).
        schedule: when each of them is sent and finished.
        compressor: how the mean pseudo-gradient is taken.
        transport: who takes part; joined here, left by `close`.
        outer_optimizer: makes the optimizer of all anchors, e.g. `partial(SGD, lr=0.7, momentum=0.9, nesterov=True)`.
        merge: how the mean becomes the new anchor and where local parameters go on from.
        hash_every: syncs between two comparisons of the anchors' hash over all workers.
        steps: of the whole run, which a slow worker, whose inner steps count more, must not overshoot.
        guard: what a contribution must be like not to be left out.
        offload: where outer state stays between syncs.

    Raises:
        Drift: anchors that must be equal are not, as when workers start from different weights.
        PeerLost: workers died in a world that cannot go on without them.
    """

    def __init__(
        self,
        fragments: list[Fragment],
        schedule: SyncSchedule,
        compressor: Compressor,
        transport: Transport,
        outer_optimizer: OuterOptimizer,
        merge: Merge = Replace(),  # noqa: B008 (a frozen value)
        hash_every: int = 10,
        steps: int | None = None,
        guard: Guard = Guard(),  # noqa: B008 (a frozen value)
        offload: Offload = Offload(),  # noqa: B008 (a frozen value)
    ) -> None:
        check_parts(fragments, schedule, compressor, transport, merge)
        self.state = OuterState(fragments, schedule, outer_optimizer, merge, offload, transport.elastic)
        self.transport, self.steps = transport, steps
        self.replicated = compressor.replicated and merge.replicated
        hash_every = hash_every if self.replicated else 0
        self.exchange = Exchange(compressor, transport, guard, not merge.replicated, hash_every, offload)
        self.local_steps = DynamicLocalSteps(schedule.local_steps)
        self._reports: list[SyncReport] = []
        self._thread = CommunicationThread(fragments[0].device)
        transport.join(self.state)
        self._start()

    @torch.no_grad()
    def step(self) -> list[SyncReport]:
        """Count one inner step; begin and finish the syncs that are due. Returns a report per finished sync."""
        for _ in range(self.local_steps.end_step(self.transport.now())):
            if self._may_advance:
                self._advance(self.state.inner_steps + 1)
        self.local_steps.start_step(self.transport.now())
        return self._take_reports()

    @torch.no_grad()
    def skip(self) -> list[SyncReport]:
        """Go on to the next sync without training: this worker has nothing to train on until then."""
        begins = False
        while self._may_advance and not begins:
            begins = bool(self.state.schedule.begins(self.state.inner_steps + 1))
            self._advance(self.state.inner_steps + 1)
        self.local_steps.start_step(self.transport.now())
        return self._take_reports()

    @torch.no_grad()
    def finish(self) -> list[SyncReport]:
        """End the run: finish what is in flight, then average once more, plainly, what was not captured yet.

        Afterwards the local parameters equal the anchors, unless a sync was refused. In an elastic world a worker may
        find here that the others have not come to the end: `state.phase` is "training" then, and it should train on.
        """
        state = self.state
        with state.lock:
            state.phase = "finishing" if state.phase == "training" else state.phase
        while state.phase in ("finishing", "averaging"):
            due = [sync.fragment for sync in state.in_order()]
            if not self._arrive(due):
                continue
            with state.lock:
                self._finish_due(due)
                if state.phase == "finishing":
                    self._send(state.capture_rest())
                state.phase = "averaging" if state.phase == "finishing" else "finished"
        reports = self._take_reports()
        if state.phase == "finished" and all(report.committed for report in reports):
            state.adopt_anchors()
        return reports

    def close(self) -> None:
        """Let go of the peers, once what is in flight has arrived, and of the communication thread."""
        if self.state.phase == "finished" and self.transport.elastic is not None:
            self._thread.run(self.transport.elastic.wait_for_the_others)
        self._thread.run(self.transport.leave)
        self._thread.close()

    def anchor_hash(self) -> str:
        """Return 16 hexadecimal digits that differ when any bit of any anchor of this worker differs.

        Where a worker has several ranks, all of them make this call, after the same step and before `close`.
        """
        job = partial(worker_fingerprint, self.state.fragments, self.transport.worker_group)
        return (job() if self.transport.worker_group.size == 1 else self._thread.run(job)).hex()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the method remembers; the model's own parameters are yours to save."""
        return self.state.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: syncs that were in flight are sent again."""
        self._arrive(sorted(self.state.in_flight))
        self._send(self.state.load_state_dict(state_dict))

    @property
    def _may_advance(self) -> bool:
        return self.state.phase == "training" and self.state.inner_steps != self.steps

    def _start(self) -> None:
        """Refuse to start from different weights; catch up where the others have started already."""
        try:
            self._thread.run(self._compare_anchors)
        except Behind:
            self._catch_up()
        else:
            self.state.apply_proposals()

    def _compare_anchors(self) -> None:
        peers = self.transport.quorum(0, self.state.propose(len(self.state.fragments) - 1))
        self.transport.commit(peers, True, fingerprint(anchors(self.state.fragments)))

    def _advance(self, step: int) -> None:
        """Take one step of the schedule. Nothing changes while this thread waits, so others can copy the state then."""
        schedule = self.state.schedule
        blocking, due = schedule.blocking(step), schedule.finishes(step)
        if not (blocking or self._arrive(due)):
            return
        with self.state.lock:
            self.state.inner_steps = step
            captured = [self.state.capture(index) for index in schedule.begins(step)]
            if not blocking:
                self._finish_due(due, captured)
            self._send(captured)
            if not blocking:
                self.state.schedule.adapt(step)
        if blocking:
            self._finish_blocking(due)

    def _finish_blocking(self, due: list[int]) -> None:
        if self._arrive(due):
            with self.state.lock:
                self._finish_due(due)
                self.state.schedule.adapt(self.state.inner_steps)

    def _send(self, syncs: list[Sync]) -> None:
        """Hand syncs to the communication thread; those that are new get their number."""
        for sync in syncs:
            if sync.outer_step < 0:
                sync.outer_step = self.state.outer_steps
                self.state.outer_steps += 1
            fragment = self.state.fragments[sync.fragment]
            job = partial(self.exchange.run, sync, fragment, fragment.state, self.transport.now())
            sync.outcome = self._thread.submit(job)
            self.state.in_flight[sync.fragment] = sync

    def _arrive(self, indices: list[int]) -> bool:
        """Wait for these fragments' syncs; False when the others had gone on and this worker took over their state."""
        for sync in [self.state.in_flight[index] for index in indices if index in self.state.in_flight]:
            before = self.transport.now()
            outcome = sync.result
            self.transport.wait_until(outcome.end)
            sync.waited_seconds = self.transport.now() - before
            if outcome.behind:
                self._reports.append(outcome.report)
                self._catch_up()
                return False
        return True

    def _finish_due(self, indices: list[int], captured: Sequence[Sync] = ()) -> None:
        """Finish the syncs of these fragments, which have arrived; `captured` is what is sent next."""
        for index in indices:
            sync = self.state.in_flight.get(index)
            outcome = self._report(sync) if sync else self.state.empty_outcome(index, self.transport.num_workers)
            self.state.finish(index, outcome, captured)

    def _report(self, sync: Sync) -> Outcome:
        """Return the outcome of a sync that has arrived, reported."""
        outcome = sync.result
        hand_over([*outcome.mean, *outcome.message])
        self._reports.append(sync.report)
        if (elastic := self.transport.elastic) is not None:
            elastic.report_speed(self.local_steps.steps_per_second)
        self.local_steps.adapt(outcome.relative_speed, self.state.schedule.schedule.local_steps)
        return outcome

    def _catch_up(self) -> None:
        """Take over the others' state, up to where the next sync begins."""
        state, elastic = self.state, self.transport.elastic
        assert elastic is not None, "in a static world nobody is ever behind"
        for sync in state.in_flight.values():
            sync.result  # noqa: B018 (waits: the communication thread must be done with all of them)
        shared = self._thread.run(partial(elastic.catch_up, state.max_snapshot_bytes))
        with state.lock:
            self._send(state.adopt(shared, self.transport.now()))
        if state.phase != "training":
            return
        self._finish_blocking(sorted(state.in_flight) if state.schedule.blocking(state.inner_steps) else [])
        while not state.schedule.begins(state.inner_steps + 1) and state.inner_steps != self.steps:
            self._advance(state.inner_steps + 1)

    def _take_reports(self) -> list[SyncReport]:
        reports, self._reports = self._reports, []
        return reports
