"""The outer loop: when the syncs of a run begin, arrive and finish."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from isthmus.compress.base import Compressor
from isthmus.core import Fragment, State, SyncReport, SyncSchedule
from isthmus.outer.anchor import adopt_anchors, compare_anchors, worker_fingerprint
from isthmus.outer.communication_thread import CommunicationThread
from isthmus.outer.dynamic_local_steps import DynamicLocalSteps
from isthmus.outer.gradients import GradientMean, check_gradient_compressor, weight_compressor
from isthmus.outer.guard import Guard
from isthmus.outer.in_flight import Sync
from isthmus.outer.merge import Merge, Replace, check_parts
from isthmus.outer.offload import Offload
from isthmus.outer.rollback import Rollback
from isthmus.outer.state import OuterOptimizer, OuterState
from isthmus.outer.sync import Exchange
from isthmus.transport.base import Behind, Transport

_LOGGER = logging.getLogger(__name__)


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
        hash_every: rounds between two comparisons of a fragment's hash over all workers.
        steps: of the whole run, which a slow worker, whose inner steps count more, must not overshoot.
        guard: what a contribution must be like not to be left out.
        offload: where outer state stays between syncs.
        rollback: when all go back to the last good anchors; None: never.
        gradient_compressor: how the mean of gradients is taken in the schedule's warm start, where weights then cross
            in float32; None: each worker steps by its own.

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
        rollback: Rollback | None = None,
        gradient_compressor: Compressor | None = None,
    ) -> None:
        check_parts(fragments, schedule, compressor, transport, merge)
        check_gradient_compressor(gradient_compressor, schedule, transport.limits.elastic)
        self.state = OuterState(fragments, schedule, outer_optimizer, merge, offload, transport.elastic, rollback)
        self.transport, self.steps = transport, steps
        self.exchange = Exchange(compressor, transport, guard, merge, hash_every, len(fragments), self.state.offload)
        self.local_steps = DynamicLocalSteps(schedule.local_steps)
        self._reports: list[SyncReport] = []
        self._thread = CommunicationThread(fragments[0].device)
        transport.join(self.state)
        self._gradient_mean = self._start_exchange = None
        if gradient_compressor is not None and transport.num_workers > 1:
            self._gradient_mean = GradientMean(gradient_compressor, transport, guard, self.state.gradient_state)
            self._start_exchange = replace(self.exchange, compressor=weight_compressor(gradient_compressor))
        try:
            self._thread.run(partial(compare_anchors, fragments, transport, self.state.propose(len(fragments) - 1)))
        except Behind:
            self._catch_up()
        else:
            self.state.note_start()

    @property
    def has_caught_up(self) -> bool:
        """Whether this worker, which has just come, has taken over what others had learnt: older states do not count.

        One commit is the first meeting's, before anybody has learnt anything.
        """
        return bool(self.state.elastic_state.get("version", 0) > 1)

    @property
    def averages_gradients(self) -> bool:
        """Whether the present inner step belongs to a start in which workers average their gradients."""
        return self._gradient_mean is not None and self.state.schedule.warm(self.state.inner_steps + 1)

    @torch.no_grad()
    def average_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of `params` by their mean over workers; after the start of the run do nothing.

        Call it between every backward pass and what reads gradients, such as clipping: all workers make the same calls.
        A gradient that is not finite is left out of the mean; where nothing is left, the mean is nan on all workers.
        """
        if self._gradient_mean is not None and self.averages_gradients:
            self._reports.append(self._gradient_mean.replace(params, self.state.inner_steps + 1, self._thread))

    @torch.no_grad()
    def step(self) -> list[SyncReport]:
        """Count one inner step; begin and finish the syncs that are due. Returns a report per finished sync."""
        if self._gradient_mean is not None and self.averages_gradients:
            self._gradient_mean.end_step()
        self.state.count_inner_step()
        for _ in range(self.local_steps.end_step(self.transport.now())):
            self._advance()
        return self._take_reports()

    @torch.no_grad()
    def skip(self) -> list[SyncReport]:
        """Go on to the next sync without training: this worker has nothing to train on until then."""
        self._advance_to_sync()
        self._advance()
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
            if self._arrive(due):
                with state.lock:
                    self._finish_due(due, [])
                    self._send(state.capture_rest() if state.phase == "finishing" else [])
                    state.phase = "averaging" if state.phase == "finishing" else "finished"
        with state.lock:
            state.offload.put_all()
        reports = self._take_reports()
        if state.phase == "finished" and all(report.committed for report in reports):
            adopt_anchors(state.fragments)
        return reports

    @torch.no_grad()
    def note_evaluation(self, loss: float) -> None:
        """Judge the loss of the present anchors: where it has exploded, all workers go back with the next sync.

        For runs with a `rollback`. One and the same worker makes this call, all of its ranks with the same loss.
        """
        line = self.state.rollbacks.note_evaluation(loss, self.state.inner_steps)
        if line and self.transport.worker_group.rank == 0:
            _LOGGER.warning(line)

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
        group = self.transport.worker_group
        job = partial(worker_fingerprint, self.state.fragments, group)
        return (job() if group.size == 1 else self._thread.run(job)).hex()

    def state_dict(self) -> State:
        """Return all that the method remembers; the model's own parameters are yours to save."""
        return self.state.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a saved state: syncs that were in flight are sent again."""
        self._arrive(sorted(self.state.in_flight))
        with self.state.lock:  # nobody may be given half of it
            self._send(self.state.load_state_dict(state_dict))

    @property
    def _may_advance(self) -> bool:
        return self.state.phase == "training" and self.state.inner_steps != self.steps

    def _advance_to_sync(self) -> None:
        while self._may_advance and not self.state.schedule.begins(self.state.inner_steps + 1):
            self._advance()

    def _advance(self) -> None:
        """Take one step of the schedule. Nothing changes while this thread waits, so others can copy the state then."""
        if not self._may_advance:
            return
        state, step = self.state, self.state.inner_steps + 1
        due = state.schedule.finishes(step)
        if state.schedule.blocking(step):
            with state.lock:
                state.inner_steps = step
                self._send([state.capture(index) for index in state.schedule.begins(step)])
            self._finish_blocking(due)
        elif self._arrive(due):
            with state.lock:
                state.inner_steps = step
                captured = [state.capture(index) for index in state.schedule.begins(step)]
                self._finish_due(due, captured)
                self._send(captured)
                state.schedule.adapt(step)
        with state.lock:
            state.prefetch()

    def _finish_blocking(self, due: list[int]) -> None:
        if self._arrive(due):
            self._finish_arrived(due)

    def _finish_arrived(self, due: list[int]) -> None:
        with self.state.lock:
            self._finish_due(due, [])
            self.state.schedule.adapt(self.state.inner_steps)

    def _send(self, syncs: list[Sync]) -> None:
        """Hand syncs to the communication thread; those that are new get their number."""
        exchange = (self.state.schedule.warm(self.state.inner_steps) and self._start_exchange) or self.exchange
        for sync in syncs:
            if sync.outer_step < 0:
                asked = any(other.asks_rollback for other in self.state.in_flight.values())
                sync.outer_step, sync.asks_rollback = self.state.outer_steps, self.state.rollbacks.wanted and not asked
                self.state.outer_steps += 1
            fragment = self.state.fragments[sync.fragment]
            sync.offer = self.state.rollbacks.offer(sync.asks_rollback)
            job = partial(exchange.run, sync, fragment, fragment.state, self.transport.now())
            sync.outcome = self._thread.submit(job)
            self.state.in_flight[sync.fragment] = sync

    def _arrive(self, indices: list[int]) -> bool:
        """Wait for these fragments' syncs; False when the others had gone on and this worker took over their state."""
        if self._wait_for(indices):
            return True
        self._catch_up()
        return False

    def _wait_for(self, indices: list[int]) -> bool:
        """Wait for these fragments' syncs; False when the others have gone on."""
        for sync in [self.state.in_flight[index] for index in indices if index in self.state.in_flight]:
            before = self.transport.now()
            outcome = sync.result
            self.transport.wait_until(outcome.end)
            sync.waited_seconds = self.transport.now() - before
            if outcome.behind:
                self._reports.append(outcome.report)
                return False
        return True

    def _finish_due(self, indices: list[int], captured: list[Sync]) -> None:
        """Finish and report the syncs of these fragments, which have arrived; `captured` is what is sent next."""
        for index in indices:
            if (sync := self.state.in_flight.get(index)) is not None:
                self._reports.append(sync.report)
                if (elastic := self.transport.elastic) is not None:
                    elastic.report_speed(self.local_steps.steps_per_second)
                self.local_steps.adapt(sync.result.relative_speed, self.state.schedule.schedule.local_steps)
            self.state.finish(index, captured, self.transport.num_workers)
        self.state.offload.release()

    def _catch_up(self) -> None:
        """Take over the others' state, up to where the next sync begins."""
        while not self._take_over():
            pass
        self._advance_to_sync()

    def _take_over(self) -> bool:
        """Take over the others' state, and finish what they wait for; False when they have gone on meanwhile."""
        state, elastic = self.state, self.transport.elastic
        assert elastic is not None, "in a static world nobody is ever behind"
        for sync in state.in_flight.values():
            sync.result  # noqa: B018 (waits: the communication thread must be done with all of them)
        shared = self._thread.run(partial(elastic.catch_up, state.max_snapshot_bytes))
        with state.lock:
            self._send(state.adopt(shared, self.transport.now()))
        if state.phase != "training":
            return True
        due = sorted(state.in_flight) if state.schedule.blocking(state.inner_steps) else []
        if not self._wait_for(due):
            return False
        self._finish_arrived(due)
        return True

    def _take_reports(self) -> list[SyncReport]:
        """Return the reports of what was finished since the last call; the next inner step begins now."""
        self.local_steps.start_step(self.transport.now())
        reports, self._reports = self._reports, []
        return reports
