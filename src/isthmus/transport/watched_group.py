"""A process group of torch.distributed that is watched by heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from isthmus.core.torch_internals import keep_alive, release
from isthmus.transport.base import PeerLost, TransportError, readable_message
from isthmus.transport.heartbeat import Heartbeat, Verdict
from isthmus.transport.send_recv import SendRecv

Backend = Literal["gloo", "nccl"]

_CONFIRM_ROUNDS = 4  # heartbeats missed after a connection broke until their owner counts as dead
NOT_JOINED = "this worker has not joined, or has left"


Works = list[dist.Work | SendRecv]
Abandon = Callable[[dist.ProcessGroup, Works], None]  # a group, and what is stuck in it


def leak(group: dist.ProcessGroup, stuck: Works) -> None:
    """Abandon a broken group in a process that ends soon: it is never freed."""
    keep_alive(group)


class AbandonedGroups:
    """The broken groups of a process that goes on: each is freed once what is stuck in it has timed out."""

    def __init__(self) -> None:
        self._groups: list[tuple[dist.ProcessGroup, Works]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: dist.ProcessGroup, stuck: Works) -> None:
        """Take over a group; it does not hold up the end of the program."""
        keep_alive(group)
        self._groups.append((group, stuck))

    def free(self) -> None:
        """Free the groups in which nothing is stuck any more."""
        done = [(group, stuck) for group, stuck in self._groups if all(work.is_completed() for work in stuck)]
        self._groups = [pair for pair in self._groups if pair not in done]
        for group, _ in done:
            release(group)


class WatchedGroup:
    """A process group whose collectives watch all ranks' heartbeats, and take no longer than the sync budget.

    Whoever of the heartbeats' ranks is lost, member or not, ends what runs here; nobody may be silent for longer than
    the patience. `abandon` says what becomes of the group then, `free` what else to do with one in which nothing is
    stuck. `kind` names the groups of all ranks that make the same collectives.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        sync_budget_seconds: float,
        patience_seconds: float,
        backend: Backend = "gloo",
        abandon: Abandon = leak,
        free: Callable[[dist.ProcessGroup], None] = dist.destroy_process_group,
        members: Sequence[int] | None = None,
        kind: str = "peers",
    ) -> None:
        self.lost: Verdict | None = None
        self._heartbeat = heartbeat
        self.sync_budget_seconds = sync_budget_seconds
        self._interval = heartbeat.interval_seconds
        self._patience_rounds = int(patience_seconds / self._interval)
        self._backend = backend
        self._abandon, self._free = abandon, free
        self.members = range(heartbeat.num_ranks) if members is None else members
        self._kind = kind
        self._group: dist.ProcessGroup | None = None

    def connect(self, make: Callable[[], dist.ProcessGroup]) -> None:
        """Make the group together with all other members; raise `PeerLost` where one does not come."""
        try:
            self._group = make()
        except RuntimeError as error:
            raise self._give_up("joining", self._find_culprit(error)) from error

    def run(self, what: str, start: Callable[[dist.ProcessGroup], Works]) -> None:
        """Start a collective, in one piece or several, and wait for it.

        It ends within the sync budget: in `PeerLost` where somebody did not answer, now or in an earlier call.
        """
        if self.lost is not None:
            raise PeerLost(self.lost.ranks, self.lost.reason)
        if self._group is None:
            raise TransportError(f"{what}: {NOT_JOINED}")
        self._heartbeat.collectives[self._kind] += 1
        deadline = time.monotonic() + self.sync_budget_seconds
        works: Works = []
        try:
            works = start(self._group)
            while works:
                done = self._done(works[0])
                works = works[1:] if done else works
                verdict = None if done else self._heartbeat.look(self._patience_rounds, self.members)
                if works and verdict is None and time.monotonic() > deadline:
                    verdict = self._out_of_time()
                if verdict is not None:
                    raise self._give_up(what, verdict, works)
        except RuntimeError as error:
            raise self._give_up(what, self._find_culprit(error), works) from error

    def find_lost(self) -> Verdict | None:
        """Wait a few heartbeats, and return the ranks that sent none."""
        for _ in range(2 * _CONFIRM_ROUNDS):
            time.sleep(self._interval)
            verdict = self._heartbeat.look(_CONFIRM_ROUNDS, self.members)
            if verdict is not None:
                return verdict
        return None

    def disconnect(self) -> None:
        """Let go of the group."""
        group, self._group = self._group, None
        if group is not None:
            self._free(group)

    def close(self, linger_seconds: float) -> None:
        """Let go of the group, and tell the others that this rank leaves; see `Heartbeat.leave`."""
        self.disconnect()
        self._heartbeat.leave(linger_seconds)

    def _done(self, work: dist.Work | SendRecv) -> bool:
        """Wait for a collective, at most one heartbeat interval."""
        if self._backend == "nccl":  # its own wait would abort the group when the time is over
            end = time.monotonic() + self._interval
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.002)
            return work.is_completed() and work.wait()
        try:
            return work.wait(timedelta(seconds=self._interval))
        except RuntimeError:  # it failed, or the interval is over (and it may have completed since)
            return work.is_completed() and work.wait()

    def _out_of_time(self) -> Verdict:
        verdict = self._heartbeat.look(_CONFIRM_ROUNDS, self.members) or self._heartbeat.late(self._kind, self.members)
        verdict = verdict or Verdict([], "though all are alive and take part")
        advice = "if this is their usual pace, raise sync_budget_seconds or send less"
        return Verdict(verdict.ranks, f"not done in {self.sync_budget_seconds:g} s, {verdict.reason}; {advice}")

    def _find_culprit(self, error: RuntimeError) -> Verdict:
        """Judge why a connection broke."""
        lost, message = self.find_lost(), readable_message(error)
        if lost is not None:
            return Verdict(lost.ranks, f"{lost.reason} ({message})")
        late = self._heartbeat.late(self._kind, self.members)
        return late or Verdict([], f"a connection broke, though all are alive ({message})")

    def _give_up(self, what: str, verdict: Verdict, stuck: Sequence[dist.Work | SendRecv] = ()) -> PeerLost:
        """Remember the loss, tell the others, and let go of the stuck collective."""
        self.lost = Verdict(verdict.ranks, f"{what} failed: {verdict.reason}")
        self._heartbeat.give_up(verdict.ranks)
        group, self._group = self._group, None
        if group is not None:
            self._abandon(group, list(stuck))
            group.abort()
        return PeerLost(self.lost.ranks, self.lost.reason)
