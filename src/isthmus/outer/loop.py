"""The outer loop: the one stateful class of the method."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from isthmus.compress.base import Compressor
from isthmus.core.fragment import Fragment
from isthmus.core.schedule import SyncSchedule
from isthmus.core.streams import hand_over
from isthmus.core.types import State, SyncReport
from isthmus.outer.anchor import anchors, fingerprint, worker_fingerprint
from isthmus.outer.apply import apply, refuse, start_over
from isthmus.outer.background import Background
from isthmus.outer.catch_up import adopt, most_bytes, shared_state
from isthmus.outer.fit import check_parts
from isthmus.outer.guard import Guard
from isthmus.outer.merge import Merge, Replace
from isthmus.outer.offload import Offload
from isthmus.outer.pace import Pace
from isthmus.outer.rounds import Rounds
from isthmus.outer.saved import restore, saved_state
from isthmus.outer.sync import Exchange, Outcome, Sync, averaged_buffers, pseudo_gradient, zeros
from isthmus.transport.base import Behind, ReplicatedState, Transport

Stage = Literal["training", "landing", "last", "finished"]
OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OuterLoop:
    """Syncs a model with its peers: call `step()` after every inner step.

    All workers build it alike and take the same number of inner steps. Nothing (anchor, outer optimizer,
    compressor memory) changes before a sync is committed by everybody.

    Args:
        fragments: the model's fragments (`isthmus.core.split_*`).
        schedule: when each of them is sent and finished.
        compressor: how the mean pseudo-gradient is taken.
        transport: who takes part; joined here, left by `close`.
        outer_optimizer: makes the optimizer of all anchors, e.g. `partial(SGD, lr=0.7, momentum=0.9, nesterov=True)`.
        merge: how the mean becomes the new anchor and where local parameters go on from.
        hash_every: syncs between two comparisons of the anchors' hash over all workers.
        steps: of the whole run: a slow worker, for which one inner step counts more, must not overshoot its end.
        guard: what a contribution must be like not to be left out.
        offload: where outer state stays between syncs.

    Raises:
        Drift: anchors that must be equal are not (here already when workers start from different weights).
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
        self.fragments, self.transport, self.merge = fragments, transport, merge
        self.rounds = Rounds(schedule)
        self.replicated = compressor.replicated and merge.replicated
        hash_every = hash_every if self.replicated else 0
        self.exchange = Exchange(compressor, transport, guard, not merge.replicated, hash_every, offload)
        self.steps = steps
        self._delayed = schedule.overlap_steps == schedule.local_steps
        self.outer_optimizer = outer_optimizer(anchors(fragments))
        self.offload = offload
        for fragment in fragments:
            offload.put_fragment(fragment, self.outer_optimizer)
        self.inner_steps = 0
        self.outer_steps = 0  # syncs sent so far, over all fragments
        self.in_flight: dict[int, Sync] = {}
        self.stage: Stage = "training"
        self.changing = threading.Lock()  # held while anything that workers share changes
        # as of the last finished sync
        self.transport_state = transport.elastic.state_dict() if transport.elastic else {}
        self.pace = Pace(schedule.local_steps)
        self._reports: list[SyncReport] = []
        self._background = Background(fragments[0].device)
        transport.join(self)
        if self._background.submit(self._compare_anchors).result():
            self._catch_up()
        elif self.replicated_state:
            self.replicated_state.apply()

    @property
    def replicated_state(self) -> ReplicatedState | None:
        """What moves with the commits; None in a static world."""
        return self.transport.elastic.replicated_state if self.transport.elastic else None

    @torch.no_grad()
    def step(self) -> list[SyncReport]:
        """Count one inner step; begin and finish the syncs that are due. Returns a report per finished sync."""
        for _ in range(self.pace.step(self.transport.now())):
            if self.stage == "training" and self.inner_steps != self.steps:
                self._advance(self.inner_steps + 1)
        self.pace.resume(self.transport.now())
        return self._take_reports()

    @torch.no_grad()
    def skip(self) -> list[SyncReport]:
        """Go on to the next sync without training: this worker has nothing to train on until then."""
        begins = False
        while self.stage == "training" and self.inner_steps != self.steps and not begins:
            begins = bool(self.rounds.begins(self.inner_steps + 1))
            self._advance(self.inner_steps + 1)
        self.pace.resume(self.transport.now())
        return self._take_reports()

    def _advance(self, step: int) -> None:
        """One step of the schedule. Nothing changes while this thread waits, so that others can take the state over."""
        blocking, due = self.rounds.blocking(step), self.rounds.finishes(step)
        if not blocking and not self._arrived(due):
            return
        with self.changing:
            self.inner_steps = step
            captured = [self._capture(index) for index in self.rounds.begins(step)]
            if not blocking:
                self._finish_all(due, captured)
            self._send(captured)
            if not blocking:
                self._adapt()
        if blocking and self._arrived(due):
            with self.changing:
                self._finish_all(due, plain=self.rounds.warm(step))
                self._adapt()

    @torch.no_grad()
    def finish(self) -> list[SyncReport]:
        """End the run: finish what is in flight, then average once more, plainly, what was not captured yet.

        Afterwards the local parameters equal the anchors, unless a sync was refused. In an elastic world a worker may
        find here that the others have not come to the end: `stage` is "training" then, and it should train on.
        """
        with self.changing:
            self.stage = "landing" if self.stage == "training" else self.stage
        while self.stage in ("landing", "last"):
            due = sorted(self.in_flight, key=lambda index: self.in_flight[index].outer_step)
            if not self._arrived(due):
                continue
            with self.changing:
                self._finish_all(due, plain=self.stage == "last", closing=self.stage == "landing")
                if self.stage == "landing":
                    rest = set(range(len(self.fragments))) - set(self.rounds.begins(self.inner_steps))
                    self._send([self._capture(index) for index in sorted(rest)] if self.inner_steps else [])
                self.stage = "last" if self.stage == "landing" else "finished"
        reports = self._take_reports()
        if self.stage == "finished" and all(report.committed for report in reports):
            for fragment in self.fragments:
                for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
                    param.copy_(anchor)
        return reports

    def close(self) -> None:
        """Let go of the peers, once what is in flight has arrived, and of the communication thread."""
        if self.stage == "finished" and self.transport.elastic:
            self._background.submit(self.transport.elastic.wait_for_the_others).result()
        self._background.submit(self.transport.leave).result()
        self._background.close()

    def anchor_hash(self) -> str:
        """16 hexadecimal digits that differ when any bit of any anchor of this worker differs.

        Where a worker has several ranks, all of them make this call, after the same step and before `close`.
        """
        if self.transport.limits.ranks_per_worker == 1:
            return fingerprint(anchors(self.fragments)).hex()
        job = partial(worker_fingerprint, self.fragments, self.transport.worker_group)
        return (self._background.submit(job).result() if self._background.close.alive else job()).hex()

    def state_dict(self) -> dict[str, Any]:
        """See `saved.saved_state`."""
        return saved_state(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: syncs that were in flight are sent again."""
        self._arrived(sorted(self.in_flight))
        again = restore(self, state_dict)
        if self.replicated_state:
            self.replicated_state.apply()
        for sync in again:
            self._dispatch(sync)

    def shared_state(self, wait_seconds: float) -> State:
        """See `catch_up.shared_state`."""
        return shared_state(self, wait_seconds)

    def _catch_up(self) -> None:
        """Take over the others' state, up to where the next sync begins."""
        for sync in self.in_flight.values():
            assert sync.outcome is not None
            sync.outcome.result()
        assert self.transport.elastic is not None
        state = self._background.submit(partial(self.transport.elastic.catch_up, most_bytes(self.fragments))).result()
        with self.changing:
            for sync in adopt(self, state):
                self._dispatch(sync)
        if self.stage != "training":
            return
        due = sorted(self.in_flight) if self.rounds.blocking(self.inner_steps) else []
        if self._arrived(due):
            with self.changing:
                self._finish_all(due, plain=self.rounds.warm(self.inner_steps))
                self._adapt()
        while not self.rounds.begins(self.inner_steps + 1) and self.inner_steps != self.steps:
            self._advance(self.inner_steps + 1)

    def _capture(self, index: int) -> Sync:
        fragment = self.fragments[index]
        own = pseudo_gradient(fragment, self.offload)
        before = self.in_flight.get(index)
        if before and self.merge.keeps_progress and not before.detached:  # on its way already: do not count it twice
            torch._foreach_sub_(own, self.offload.get(before.own, fragment.device))
        detached = self._delayed and not self.merge.keeps_progress and not self.rounds.warm(self.inner_steps)
        replicated_state = self.replicated_state if index == len(self.fragments) - 1 else None  # it moves once a round
        return Sync(
            index, own, detached, replicated_state.propose() if replicated_state else None, averaged_buffers(fragment)
        )

    def _send(self, captured: list[Sync]) -> None:
        for sync in captured:
            sync.outer_step = self.outer_steps
            self.outer_steps += 1
            self._dispatch(sync)

    def _dispatch(self, sync: Sync) -> None:
        fragment = self.fragments[sync.fragment]
        job = partial(self.exchange.run, sync, fragment, fragment.state, self.transport.now())
        sync.outcome = self._background.submit(job)
        self.in_flight[sync.fragment] = sync

    def _finish_all(
        self, indices: list[int], captured: Sequence[Sync] = (), plain: bool = False, closing: bool = False
    ) -> None:
        """Apply the syncs of these fragments, which have arrived; `captured` is what is sent next. See `apply`."""
        for index in indices:
            newer = next((sync for sync in captured if sync.fragment == index), None)
            fragment, sync = self.fragments[index], self.in_flight.pop(index, None)
            outcome = self._take(sync) if sync else self._empty(fragment)
            self.transport_state = outcome.transport
            if self.replicated_state and index == len(self.fragments) - 1:
                self.replicated_state.apply()
            if sync and not outcome.report.committed:
                refuse(fragment, sync, newer, self.offload)
            else:
                self.rounds.message_fraction = outcome.report.message_fraction
                parts = (self.merge, self.outer_optimizer, newer, plain, closing, self.offload)
                apply(fragment, sync, outcome, *parts)
            if sync and sync.left_out:
                start_over(self.fragments, [*self.in_flight.values(), *captured])
                if self.replicated_state:
                    self.replicated_state.roll_back()

    def _arrived(self, indices: list[int]) -> bool:
        """Wait for these fragments' syncs; False when the others had gone on and this worker took over their state."""
        for sync in [self.in_flight[index] for index in indices if index in self.in_flight]:
            assert sync.outcome is not None
            before = self.transport.now()
            outcome = sync.outcome.result()
            self.transport.wait_until(outcome.end)
            sync.waited_seconds = self.transport.now() - before
            if outcome.behind:
                self._reports.append(outcome.report)
                self._catch_up()
                return False
        return True

    def _adapt(self) -> None:
        """Where a round begins now: how long it is to be."""
        self.rounds.adapt(self.inner_steps)
        self.pace.local_steps = self.rounds.schedule.local_steps

    def _take(self, sync: Sync) -> Outcome:
        """The outcome of a sync that has arrived, reported."""
        assert sync.outcome is not None
        outcome = sync.outcome.result()
        hand_over([*outcome.mean, *outcome.message])
        hidden_seconds = max(0.0, outcome.report.seconds - sync.waited_seconds)
        self._reports.append(replace(outcome.report, hidden_seconds=hidden_seconds))
        if self.transport.elastic:
            self.transport.elastic.report_speed(self.pace.steps_per_second)
        self.pace.adopt(outcome.relative_speed)
        return outcome

    def _empty(self, fragment: Fragment) -> Outcome:
        """The sync before the first one: nobody had anything to send."""
        share, now = 1 / self.transport.num_workers, self.transport.now()
        return Outcome.without_own(fragment, zeros(fragment), share, self.transport_state, now)

    def _compare_anchors(self) -> bool:
        """Refuse to start from different weights; True when the others have started already."""
        try:
            replicated_state = self.replicated_state
            peers = self.transport.quorum(0, replicated_state.propose() if replicated_state else None)
            self.transport.commit(peers, True, fingerprint(anchors(self.fragments)))
        except Behind:
            return True
        return False

    def _take_reports(self) -> list[SyncReport]:
        reports, self._reports = self._reports, []
        return reports
