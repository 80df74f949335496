"""A process group under watch: what transports over torch.distributed have in common."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from isthmus.core.streams import copy_to
from isthmus.core.types import WorkerGroup
from isthmus.transport.base import PeerLost, TransportError
from isthmus.transport.heartbeat import Heartbeat, Verdict
from isthmus.transport.messages import Messages
from isthmus.transport.peers import BufferPeers
from isthmus.transport.rendezvous import first_line
from isthmus.transport.worker_group import SINGLE_RANK, all_gather

Backend = Literal["gloo", "nccl"]

_CONFIRM_ROUNDS = 4  # heartbeats missed after a connection broke until their owner counts as dead
NOT_JOINED = "this worker has not joined, or has left"


Works = list[dist.Work | Messages]
Abandon = Callable[[dist.ProcessGroup, Works], None]  # a group, and what is stuck in it


def keep_for_ever(group: dist.ProcessGroup, stuck: Works) -> None:
    """Let go of a broken group in a process that ends soon.

    gloo cannot abort: freeing the group would wait until the stuck collective times out.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Leftovers:
    """Lets go of broken groups in a process that goes on: each is freed once what is stuck in it has timed out."""

    def __init__(self) -> None:
        self._kept: list[tuple[dist.ProcessGroup, Works]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, group: dist.ProcessGroup, stuck: Works) -> None:
        """Take over a group; it does not hold up the end of the program."""
        keep_for_ever(group, stuck)
        self._kept.append((group, stuck))

    def free(self) -> None:
        """Free those in which nothing is stuck any more."""
        done = [(group, stuck) for group, stuck in self._kept if all(work.is_completed() for work in stuck)]
        self._kept = [pair for pair in self._kept if pair not in done]
        for group, _ in done:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


class WatchedGroup:
    """Collectives, each with an eye on everybody's heartbeats, and none longer than the sync budget.

    Args:
        heartbeat: of all ranks; whoever is lost, member or not, ends what runs here.
        sync_budget_seconds: bound on one collective.
        patience_seconds: how long a rank may be silent.
        backend: of the group.
        abandon: what becomes of the group when a rank is lost.
        members: ranks in the group; None: all.
        kind: names the groups of all ranks that make the same collectives.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        sync_budget_seconds: float,
        patience_seconds: float,
        backend: Backend,
        abandon: Abandon,
        members: Sequence[int] | None = None,
        kind: str = "peers",
    ) -> None:
        self.lost: Verdict | None = None
        self._heartbeat = heartbeat
        self.sync_budget_seconds = sync_budget_seconds
        self._interval = heartbeat.interval_seconds
        self._patience_rounds = int(patience_seconds / self._interval)
        self._backend = backend
        self._abandon = abandon
        self.members = range(heartbeat.num_ranks) if members is None else members
        self._kind = kind
        self._group: dist.ProcessGroup | None = None

    def connect(self, make: Callable[[], dist.ProcessGroup]) -> None:
        """Make the group, with everybody.

        Raises:
            PeerLost: that failed.
        """
        try:
            self._group = make()
        except RuntimeError as error:
            raise self._give_up("joining", self._find_culprit(error)) from error

    def run(self, what: str, start: Callable[[dist.ProcessGroup], Works]) -> None:
        """Start a collective, in one piece or several, and wait for it.

        Raises:
            PeerLost: somebody did not answer within the sync budget, now or in an earlier call.
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
                verdict = None if done else self._look(self._patience_rounds)
                if works and verdict is None and time.monotonic() > deadline:
                    verdict = self._out_of_time()
                if verdict is not None:
                    raise self._give_up(what, verdict, works)
        except RuntimeError as error:
            raise self._give_up(what, self._find_culprit(error), works) from error

    def find_lost(self) -> Verdict | None:
        """Give a heart that stopped a few beats to show."""
        for _ in range(2 * _CONFIRM_ROUNDS):
            time.sleep(self._interval)
            verdict = self._look(_CONFIRM_ROUNDS)
            if verdict is not None:
                return verdict
        return None

    def disconnect(self, free: Callable[[dist.ProcessGroup], None]) -> None:
        """Let go of the group; `free` is what else to do with one in which nothing is stuck."""
        group, self._group = self._group, None
        if group is not None:
            free(group)

    def close(self, free: Callable[[dist.ProcessGroup], None], linger_seconds: float) -> None:
        """Let go of the group and say goodbye.

        Args:
            free: see `disconnect`.
            linger_seconds: how long the holder of the heartbeats' store waits for the others to leave.
        """
        self.disconnect(free)
        self._heartbeat.leave(linger_seconds)

    def _done(self, work: dist.Work | Messages) -> bool:
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
        verdict = self._look(_CONFIRM_ROUNDS) or self._late() or Verdict([], "though all are alive and take part")
        advice = "if this is their usual pace, raise sync_budget_seconds or send less"
        return Verdict(verdict.ranks, f"not done in {self.sync_budget_seconds:g} s, {verdict.reason}; {advice}")

    def _look(self, patience_rounds: int) -> Verdict | None:
        return self._heartbeat.look(patience_rounds, self.members)

    def _late(self) -> Verdict | None:
        return self._heartbeat.late(self._kind, self.members)

    def _find_culprit(self, error: RuntimeError) -> Verdict:
        """Whose fault it is that a connection broke."""
        verdict = self.find_lost()
        if verdict is not None:
            return Verdict(verdict.ranks, f"{verdict.reason} ({first_line(error)})")
        return self._late() or Verdict([], f"a connection broke, though all are alive ({first_line(error)})")

    def _give_up(self, what: str, verdict: Verdict, stuck: Sequence[dist.Work | Messages] = ()) -> PeerLost:
        """Remember the loss, tell the others, and let go of the stuck collective."""
        self.lost = Verdict(verdict.ranks, f"{what} failed: {verdict.reason}")
        self._heartbeat.give_up(verdict.ranks)
        group, self._group = self._group, None
        if group is not None:
            self._abandon(group, list(stuck))
            group.abort()
        return PeerLost(self.lost.ranks, self.lost.reason)


class GroupPeers(BufferPeers):
    """The members of one group; one that is alone needs none.

    Args:
        group: whose collectives move the bytes.
        rank: this worker among them.
        weights: everybody's.
        name: of the sync, for messages.
        device: where the group's backend wants its buffers.
        worker_group: the process group of this worker's own ranks.
    """

    def __init__(
        self,
        group: WatchedGroup | None,
        rank: int,
        weights: list[float],
        name: str,
        device: str = "cpu",
        worker_group: WorkerGroup = SINGLE_RANK,
    ) -> None:
        super().__init__(rank, weights)
        self._group, self._name, self._device, self.worker_group = group, name, torch.device(device), worker_group
        self._seconds = 0.0 if group is None else 2 * group.sync_budget_seconds  # the group itself watches the time

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        total = self._staged(buffer)
        self._run("mean", lambda group: [_work(dist.all_reduce(total, group=group, async_op=True))])
        return total.to(buffer.device)

    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        own = self._staged(buffer)
        result = own.new_empty(self.size, len(own))
        if self._device.type == "cpu":
            self._swap("gather", [own] * self.size, result)
        else:
            self._run("gather", lambda group: [all_gather(result.view(-1), own, group=group, async_op=True)])
        return result.view(-1).to(buffer.device)

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts, size = self._staged(buffer), sizes[self.rank]
        result = parts.new_empty(self.size, size)
        if self._device.type == "cpu":
            self._swap("exchange", torch.split(parts, sizes), result)
        else:
            self._run(
                "exchange",
                lambda group: [
                    _work(
                        dist.all_to_all_single(
                            result.view(-1), parts, [size] * self.size, sizes, group=group, async_op=True
                        )
                    )
                ],
            )
        return result.view(-1).to(buffer.device)

    def _swap(self, kind: str, outgoing: Sequence[torch.Tensor], incoming: torch.Tensor) -> None:
        """To each member what is its own, from each what is for this one: [size, n]."""
        rows = list(incoming)
        self._run(kind, lambda group: [Messages(group, self.rank, outgoing, rows, self._seconds)])

    def _staged(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where the backend wants it; the training stream does not wait for that."""
        return buffer if buffer.device.type == self._device.type else copy_to(buffer, self._device)

    def _run(self, kind: str, start: Callable[[dist.ProcessGroup], Works]) -> None:
        what = f"{kind} of {self._name}"
        if self._group is None:
            raise TransportError(f"{what}: {NOT_JOINED}")
        self._group.run(what, start)


def _work(started: dist.Work | None) -> dist.Work:
    """Of a collective that was started with `async_op`."""
    assert started is not None
    return started
