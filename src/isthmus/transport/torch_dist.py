"""A static world over torch.distributed: gloo by default, NCCL possible."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Literal

import torch
import torch.distributed as dist

from isthmus.core.types import Peers, UserError
from isthmus.transport.base import PeerLost, Stateful, TransportError, TransportLimits
from isthmus.transport.heartbeat import Heartbeat, Verdict
from isthmus.transport.identity import check_identities
from isthmus.transport.peers import BufferPeers, vote
from isthmus.transport.rendezvous import exchange_cards, find_world, first_line, initialise, open_store

_JOIN_BUDGETS = 10  # clusters do not start at the same moment: workers wait this many sync budgets for one another
_CONFIRM_ROUNDS = 4  # heartbeats missed after a connection broke until their owner counts as dead
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
_LINGER_SECONDS = 5.0  # how long a leaving worker that holds the store waits for the others to leave


class TorchDist:
    """All ranks of torch.distributed, one worker each, with equal weights.

    Works under torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and where
    torch.distributed is initialised already; a worker alone needs neither. Collectives run in a process group of
    their own and none takes longer than the sync budget: a worker that died, stopped or was cut off is found by
    its missing heartbeats and named in `PeerLost`. A static world cannot go on then: resume from a checkpoint.

    Args:
        sync_budget_seconds: bound on one collective; all other timeouts follow from it.
        backend: "gloo" runs beside training and stages CUDA tensors through the CPU; "nccl" must not overlap.
        identity: a flat configuration that all workers must share, compared at join.
        expected_workers: how many the configuration speaks of.
    """

    def __init__(
        self,
        sync_budget_seconds: float = 60.0,
        backend: Literal["gloo", "nccl"] = "gloo",
        identity: dict[str, str] | None = None,
        expected_workers: int | None = None,
    ) -> None:
        self.sync_budget_seconds = sync_budget_seconds
        self.backend = backend
        self.identity = {"isthmus version": version("isthmus"), **(identity or {})}
        self.expected_workers = expected_workers
        self.limits = TransportLimits(safe_to_overlap=backend == "gloo")
        self.rank, self.num_workers = 0, 1
        self._interval = min(1.0, sync_budget_seconds / 20)
        self._patience_rounds = int(min(30.0, sync_budget_seconds / 3) / self._interval)
        self._heartbeat: Heartbeat | None = None
        self._group: dist.ProcessGroup | None = None
        self._lost: Verdict | None = None
        self._leaving = threading.Lock()

    def join(self, replica: Stateful) -> None:
        """Meet the other workers, compare configurations, connect. In a static world nobody has to catch up.

        Raises:
            UserError: no launcher, a port in use, another number of ranks than expected, workers that differ.
            PeerLost: a worker did not come.
        """
        self.rank, self.num_workers = find_world()
        if self.expected_workers not in (None, self.num_workers):
            ranks = f"{self.num_workers} rank{'s' if self.num_workers > 1 else ''}"
            raise UserError(f"the configuration says {self.expected_workers} workers, but {ranks} started")
        if self.num_workers == 1 or self._group is not None:
            return
        if not dist.is_initialized():
            initialise(self.backend, _JOIN_BUDGETS * self.sync_budget_seconds)
        atexit.register(self.leave)
        try:
            self._meet()
        except BaseException:
            self.leave()
            raise

    def quorum(self, outer_step: int) -> Peers:
        """All ranks, always."""
        return _TorchPeers(self, outer_step)

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote; see `Transport.commit`."""
        return vote(peers, ok, fingerprint)

    def leave(self) -> None:
        """Say goodbye and disconnect. A second call does nothing; torch.distributed itself stays initialised."""
        with self._leaving:
            heartbeat, group = self._heartbeat, self._group
            self._heartbeat = self._group = None
            if group is not None and self._lost is None:
                dist.destroy_process_group(group)
            if heartbeat is not None:
                heartbeat.leave(_LINGER_SECONDS)

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def wait_until(self, seconds: float) -> None:
        """Nothing to do: real time passes by itself."""

    def run(self, what: str, start: Callable[[dist.ProcessGroup], dist.Work | None]) -> None:
        """Start a collective and wait for it, with an eye on the others' heartbeats.

        Raises:
            PeerLost: somebody did not answer within the sync budget, now or in an earlier call.
        """
        if self._lost is not None:
            raise PeerLost(self._lost.ranks, self._lost.reason)
        heartbeat, group = self._heartbeat, self._group
        if heartbeat is None or group is None:
            raise TransportError(f"{what}: this worker has not joined, or has left")
        heartbeat.collectives += 1
        deadline = time.monotonic() + self.sync_budget_seconds
        try:
            work = start(group)
            assert work is not None
            while not self._done(work):
                verdict = heartbeat.look(self._patience_rounds)
                if verdict is None and time.monotonic() > deadline:
                    verdict = self._out_of_time(heartbeat)
                if verdict is not None:
                    raise self._give_up(heartbeat, what, verdict)
        except RuntimeError as error:
            raise self._give_up(heartbeat, what, self._find_culprit(heartbeat, error)) from error

    def _meet(self) -> None:
        store, store_rank = open_store()
        self._heartbeat = heartbeat = Heartbeat(store, self.rank, self.num_workers, store_rank, self._interval)
        join_seconds = _JOIN_BUDGETS * self.sync_budget_seconds
        cards = exchange_cards(store, self.rank, self.num_workers, self.identity, join_seconds)
        heartbeat.start([card.host for card in cards])
        check_identities([card.identity for card in cards])
        try:
            # twice the budget: `run` watches the time itself, and knows better than the backend whom to blame
            timeout = timedelta(seconds=2 * self.sync_budget_seconds)
            self._group = dist.new_group(timeout=timeout, backend=self.backend)
        except RuntimeError as error:
            raise self._give_up(heartbeat, "joining", self._find_culprit(heartbeat, error)) from error

    def _done(self, work: dist.Work) -> bool:
        """Wait for a collective, at most one heartbeat interval."""
        if self.backend == "nccl":  # its own wait would abort the group when the time is over
            end = time.monotonic() + self._interval
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.002)
            return work.is_completed() and work.wait()
        try:
            return work.wait(timedelta(seconds=self._interval))
        except RuntimeError:  # it failed, or the interval is over (and it may have completed since)
            return work.is_completed() and work.wait()

    def _out_of_time(self, heartbeat: Heartbeat) -> Verdict:
        verdict = (
            heartbeat.look(_CONFIRM_ROUNDS) or heartbeat.late() or Verdict([], "though all are alive and take part")
        )
        advice = "if this is their usual pace, raise sync_budget_seconds or send less"
        return Verdict(verdict.ranks, f"not done in {self.sync_budget_seconds:g} s, {verdict.reason}; {advice}")

    def _find_culprit(self, heartbeat: Heartbeat, error: RuntimeError) -> Verdict:
        """A connection broke; give the heart that stopped a few beats to show."""
        for _ in range(2 * _CONFIRM_ROUNDS):
            time.sleep(self._interval)
            verdict = heartbeat.look(_CONFIRM_ROUNDS)
            if verdict is not None:
                return Verdict(verdict.ranks, f"{verdict.reason} ({first_line(error)})")
        return heartbeat.late() or Verdict([], f"a connection broke, though all are alive ({first_line(error)})")

    def _give_up(self, heartbeat: Heartbeat, what: str, verdict: Verdict) -> PeerLost:
        """Remember the loss, tell the others, and let go of the stuck collective."""
        self._lost = Verdict(verdict.ranks, f"{what} failed: {verdict.reason}")
        heartbeat.give_up(verdict.ranks)
        if self._group is not None:
            # gloo cannot abort: freeing the group would wait until the stuck collective times out, so it is kept
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._group.abort()
        return PeerLost(self._lost.ranks, self._lost.reason)


class _TorchPeers(BufferPeers):
    """All ranks, through one process group."""

    def __init__(self, transport: TorchDist, outer_step: int) -> None:
        super().__init__(transport.rank, [1 / transport.num_workers] * transport.num_workers)
        self._transport = transport
        self._name = f"sync {outer_step}"
        self._device = torch.device("cpu" if transport.backend == "gloo" else "cuda")

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        total = buffer.to(self._device)
        self._run("mean", lambda group: dist.all_reduce(total, group=group, async_op=True))
        return total.to(buffer.device)

    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        own = buffer.to(self._device)
        result = own.new_empty(self.size * len(own))
        self._run("gather", lambda group: _all_gather(result, own, group=group, async_op=True))
        return result.to(buffer.device)

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = buffer.to(self._device)
        received = [sizes[self.rank]] * self.size
        result = parts.new_empty(sum(received))
        self._run(
            "exchange",
            lambda group: dist.all_to_all_single(result, parts, received, sizes, group=group, async_op=True),
        )
        return result.to(buffer.device)

    def _run(self, kind: str, start: Callable[[dist.ProcessGroup], dist.Work | None]) -> None:
        self._transport.run(f"{kind} of {self._name}", start)
