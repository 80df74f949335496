"""Toy workers in an elastic world of threads: killed at a chosen point, started again, looked at."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from isthmus.compress import Cast
from isthmus.core import SyncSchedule, split_whole
from isthmus.outer import OuterLoop
from isthmus.transport.base import Replica, TransportError
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.peers import BufferPeers
from tests.local_membership import LocalMembership, LocalRendezvousServer
from tests.toy import Worker, inner_step, nesterov, sgd, toy_batch, toy_model


class Killed(BaseException):
    """What a worker's thread dies of."""


class Watched(ElasticTransport):
    """An elastic transport that tells when it connects for a sync, votes and catches up, and what came of it."""

    def __init__(self, disturb: Callable[[str], None], **options: Any) -> None:
        super().__init__(**options)
        self.disturb, self._catch_up = disturb, self.elastic.catch_up
        self.elastic.catch_up = self.catch_up

    def join(self, replica: Replica) -> None:
        super().join(replica)
        connect = self.elastic.peer_group.peers

        def peers(*arguments: Any) -> BufferPeers:
            self.disturb("connect")
            return connect(*arguments)

        self.elastic.peer_group.peers = peers

    def commit(self, peers: Any, ok: bool, fingerprint: bytes = b"") -> bool:
        try:
            self.disturb("vote")
        except TransportError:
            self.elastic.peer_group.close()  # as a real one is: else the others wait for this vote
            raise
        committed = super().commit(peers, ok, fingerprint)
        self.disturb("committed")
        return committed

    def catch_up(self, max_bytes: int) -> Any:
        self.disturb("heal")
        state = self._catch_up(max_bytes)
        self.disturb("healed")
        return state


class Town:
    """Starts workers (threads) in one elastic world, and waits for them."""

    def __init__(
        self,
        steps: int,
        min_workers: int | None = 1,
        expected_workers: int = 1,
        grace_seconds: float = 10.0,
        **method: Any,
    ) -> None:
        self.server = LocalRendezvousServer(grace_seconds)
        self.steps, self.min_workers, self.expected_workers = steps, min_workers, expected_workers
        self.method = {"schedule": SyncSchedule(3), "compressor": Cast(), "outer_optimizer": nesterov, **method}
        self.split = self.method.pop("split", split_whole)
        self.make_model = self.method.pop("make_model", toy_model)
        self.workers: dict[str, Worker] = {}
        self.hashes: dict[int, set[str]] = {}  # version: hashes of the anchors of those who had it
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(
        self,
        name: str,
        disturb: Callable[[str], None] = lambda point: None,
        each_step: Callable[[Worker], None] = lambda worker: None,
    ) -> threading.Thread:
        thread = threading.Thread(target=self._live, args=(name, disturb, each_step), daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def wait(self, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while any(thread.is_alive() for thread in self._threads) and not self.errors:
            assert time.monotonic() < end, "still running"
            time.sleep(0.01)
        if self.errors:
            raise self.errors[0]

    def _live(self, name: str, disturb: Callable[[str], None], each_step: Callable[[Worker], None]) -> None:
        transport = Watched(
            disturb,
            membership=LocalMembership(self.server, name, disturb),
            expected_workers=self.expected_workers,
            min_workers=self.min_workers,
            sync_budget_seconds=5.0,
        )
        try:
            model = self.make_model()
            loop = OuterLoop(self.split(model), transport=transport, steps=self.steps, **self.method)
            worker = self.workers[name] = Worker(model, sgd(model.parameters()), loop)
            while loop.state.phase != "finished":
                while loop.state.inner_steps < self.steps:
                    inner_step(model, worker.optimizer, toy_batch(int(name[-1]), loop.state.inner_steps))
                    worker.reports += loop.step()
                    self.hashes.setdefault(loop.state.elastic_state["version"], set()).add(loop.anchor_hash())
                    each_step(worker)
                worker.reports += loop.finish()
            loop.close()
        except Killed:
            transport.leave()
        except BaseException as error:
            self.errors.append(error)
            transport.leave()


def kill_at(point: str, number: int, at_once: bool = False) -> Callable[[str], None]:
    """Dies at the `number`-th time that `point` is reached once it has been in a group, or at once."""
    seen: list[str] = []

    def disturb(now: str) -> None:
        if at_once or seen or now == "connect":
            seen.append(now)
        if now == point and seen.count(point) == number:
            raise Killed

    return disturb


def lose(point: str, number: int) -> Callable[[str], None]:
    """The `number`-th time that `point` is reached, this worker loses its connection there."""
    count = itertools.count(1)

    def disturb(now: str) -> None:
        if now == point and next(count) == number:
            raise TransportError("the connection is lost")

    return disturb
