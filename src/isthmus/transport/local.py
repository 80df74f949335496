"""All workers in one process: a thread each, real bytes, and a virtual clock over modelled links.

Every thread of a worker has a clock of its own, which starts at 0. `now` reads the calling thread's clock,
`advance` moves it by what was computed, `wait_until` moves it on to a time handed over by another thread. A
collective begins at the latest of its callers' clocks and sets all of them to its end. So on the communication
thread a sync begins when it was submitted or when the one before has ended, and the training thread, once it
needs the result, waits until that sync's end: what it computed meanwhile is hidden, not counted twice. Nothing
depends on real time, so the same run gives the same times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from typing_extensions import override

from isthmus.core.streams import finish_copies, hand_over
from isthmus.core.types import Peers
from isthmus.link.lane import num_bulk_lanes
from isthmus.transport.base import ElasticPart, PeerLost, Replica, TransportError
from isthmus.transport.configured import ConfiguredTransport
from isthmus.transport.link_model import Collective, CollectiveKind, LinkModel, PerLink
from isthmus.transport.peers import BufferPeers, name_workers, vote
from isthmus.transport.worker_group import SINGLE_RANK

Result = TypeVar("Result")
Kind = CollectiveKind | Literal["exchange"]


@dataclass(frozen=True)
class _Arrival:
    """The part of one worker in a collective."""

    kind: Kind
    start: float  # its clock
    buffer: torch.Tensor
    sizes: list[int]  # bytes for each rank
    lost: bool = False

    @property
    def call(self) -> str:
        """What all workers must have called alike."""
        return self.kind if self.kind == "exchange" else f"{self.kind} of {self.sizes} bytes"


class LocalWorld:
    """All workers of one process, and the links between them.

    Args:
        num_workers: how many.
        bandwidth_bits_per_second: of every link, or one value per [sender][receiver]; None: infinite.
        latency_seconds: of every link, one way, or one value per [sender][receiver].
        weights: each worker's share of the mean, summing to 1; None: equal shares.
        window_bytes: that one connection moves in a round trip (`WINDOW_BYTES` is usual); None: as many as there are.
        has_rendezvous: whether a sync begins with the workers finding one another, as in an elastic world.

    Attributes:
        recorded: all collectives from now on, where a list is put here.
    """

    def __init__(
        self,
        num_workers: int,
        bandwidth_bits_per_second: PerLink | None = None,
        latency_seconds: PerLink = 0.0,
        weights: Sequence[float] | None = None,
        window_bytes: float | None = None,
        has_rendezvous: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self.links = LinkModel.between(num_workers, bandwidth_bits_per_second, latency_seconds, window_bytes)
        self.has_rendezvous = has_rendezvous
        self.recorded: list[Collective] | None = None
        self.weights = [1 / num_workers] * num_workers if weights is None else list(weights)
        self.refused: set[tuple[int, int]] = set()  # (outer_step, rank) of votes that will be no
        self.lost: set[tuple[int, int]] = set()  # (outer_step, rank) of messages that will be lost
        self._changed = threading.Condition()
        self._gone: dict[int, str] = {}  # rank: what became of it
        self._num_entered = [0] * num_workers  # collectives that each worker has entered
        self._collectives: dict[int, dict[int, _Arrival]] = {}  # by number: what has arrived, by rank

    def kill(self, rank: int, reason: str = "was killed") -> None:
        """Have worker `rank`'s calls raise `TransportError`, and those that wait for it `PeerLost`."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._changed.notify_all()

    def refuse_commit(self, outer_step: int, rank: int = 0) -> None:
        """Have worker `rank` vote against sync `outer_step`."""
        self.refused.add((outer_step, rank))

    def lose_message(self, outer_step: int, rank: int = 0) -> None:
        """Lose the first message of worker `rank` in sync `outer_step`: `TransportError` on all peers."""
        self.lost.add((outer_step, rank))

    def enter(self, rank: int, arrival: _Arrival) -> list[_Arrival]:
        """Block until every worker has entered this collective; return what they brought, in rank order."""
        with self._changed:
            number = self._num_entered[rank]
            self._num_entered[rank] += 1
            arrived = self._collectives.setdefault(number, {})
            arrived[rank] = arrival
            if len(arrived) == self.num_workers:
                del self._collectives[number]
                self._changed.notify_all()
            while True:
                self.check_alive(rank)
                if len(arrived) == self.num_workers:
                    break
                gone = sorted(self._gone.keys() - arrived.keys())
                if gone:
                    raise PeerLost(gone, "; ".join(f"worker {r} {self._gone[r]}" for r in gone))
                self._changed.wait()
        arrivals = [arrived[r] for r in range(self.num_workers)]
        lost = [r for r, a in enumerate(arrivals) if a.lost]
        if lost:
            raise TransportError(f"a message of {name_workers(lost)} was lost")
        calls = [arrival.call for arrival in arrivals]
        if len(set(calls)) > 1:
            raise TransportError(f"workers disagree, in rank order they called: {', '.join(calls)}")
        return arrivals

    def check_alive(self, rank: int) -> None:
        """Raise `TransportError` when worker `rank` is gone."""
        if rank in self._gone:
            raise TransportError(f"worker {rank} {self._gone[rank]}")


class Local(ConfiguredTransport):
    """Worker `rank` of a `LocalWorld`: a transport for tests, notebooks, the simulator and the planner."""

    elastic: ElasticPart | None = None
    worker_group = SINGLE_RANK

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.num_workers = world.num_workers
        self._clock = threading.local()

    def join(self, replica: Replica) -> None:
        """Do nothing: all workers are there from the beginning."""

    def quorum(self, outer_step: int, proposal: Any = None) -> BufferPeers:
        """Return all workers, always; the sync begins at the calling thread's time."""
        self.world.check_alive(self.rank)
        peers = _LocalPeers(self, outer_step)
        if self.world.has_rendezvous:
            peers.meet()
        return peers

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote, and return whether all agreed; see `Transport.commit`."""
        assert isinstance(peers, _LocalPeers)
        refused = (peers.outer_step, self.rank) in self.world.refused
        return vote(peers, ok and not refused, fingerprint)

    def leave(self) -> None:
        """Leave: peers that still wait for this worker, or will, get `PeerLost`."""
        self.world.kill(self.rank, "left")

    @override
    def now(self) -> float:
        """Return the calling thread's virtual time in seconds."""
        return getattr(self._clock, "seconds", 0.0)

    def advance(self, seconds: float) -> None:
        """Move the calling thread's clock on by `seconds` of computing."""
        self._clock.seconds = self.now() + seconds

    @override
    def wait_until(self, seconds: float) -> None:
        """Move the calling thread's clock on to `seconds`, if it is not there yet."""
        self._clock.seconds = max(self.now(), seconds)


class _LocalPeers(BufferPeers):
    """All workers of the world, as the peers of one sync."""

    def __init__(self, transport: Local, outer_step: int) -> None:
        super().__init__(transport.rank, list(transport.world.weights))
        self.outer_step = outer_step
        self._transport, self._links = transport, transport.world.links

    def meet(self) -> None:
        """Take the time of a rendezvous."""
        self._call("rendezvous", torch.empty(0, dtype=torch.uint8), [])

    @override
    def connections_to(self, rank: int) -> int:
        return num_bulk_lanes(self._links.round_trip_seconds(self.rank, rank))

    @override
    def exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], num_connections: int | None = None
    ) -> None:
        arrivals = self._enter("exchange", torch.cat(list(outgoing)), [len(part) for part in outgoing])
        sizes = [arrival.sizes for arrival in arrivals]
        self._finish(arrivals, self._links.exchange_seconds(lambda a, b: sizes[a][b], num_connections))
        for arrival, into in zip(arrivals, incoming, strict=True):
            into.copy_(arrival.buffer.split_with_sizes(arrival.sizes)[self.rank])

    @override
    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        arrivals = self._call("all_reduce", buffer, [4 * len(buffer)])
        total = arrivals[0].buffer.clone()
        for arrival in arrivals[1:]:
            total += arrival.buffer
        return total

    @override
    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        return torch.cat([arrival.buffer for arrival in self._call("all_gather", buffer, [len(buffer)])])

    @override
    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        arrivals = self._call("all_to_all", buffer, sizes)
        start, end = sum(sizes[: self.rank]), sum(sizes[: self.rank + 1])
        return torch.cat([arrival.buffer[start:end] for arrival in arrivals])

    def _call(self, kind: CollectiveKind, buffer: torch.Tensor, sizes: list[int]) -> list[_Arrival]:
        """Return what all workers brought to a collective, at its end."""
        arrivals = self._enter(kind, buffer, sizes)
        collective = Collective(kind, [arrival.sizes for arrival in arrivals])
        recorded = self._transport.world.recorded
        if recorded is not None and self.rank == 0:
            recorded.append(collective)
        self._finish(arrivals, self._links.seconds(collective))
        return arrivals

    def _enter(self, kind: Kind, buffer: torch.Tensor, sizes: list[int]) -> list[_Arrival]:
        world, key = self._transport.world, (self.outer_step, self.rank)
        lost = key in world.lost
        world.lost.discard(key)
        finish_copies(buffer.device)  # on a GPU the peers' streams would not wait for this thread's
        arrivals = world.enter(self.rank, _Arrival(kind, self._transport.now(), buffer, sizes, lost))
        hand_over(arrival.buffer for arrival in arrivals)
        return arrivals

    def _finish(self, arrivals: list[_Arrival], seconds: float) -> None:
        self._transport.wait_until(max(arrival.start for arrival in arrivals) + seconds)


def run_workers(
    world: LocalWorld, function: Callable[[int, Local], Result], timeout_seconds: float = 300.0
) -> list[Result]:
    """Run `function(rank, transport)` for every worker, a thread each; return what they returned, in rank order.

    Raises:
        Exception: the first that any worker raised; its peers get `PeerLost`.
        TransportError: workers were still busy after `timeout_seconds` of real time.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        transport = Local(world, rank)
        try:
            results[rank] = function(rank, transport)
            transport.leave()
        except BaseException as error:
            errors.append(error)
            world.kill(rank, f"failed ({type(error).__name__}: {error})")

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world.num_workers)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    busy = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for rank in busy:
        world.kill(rank, f"was stopped after {timeout_seconds} s")
    if errors:
        raise errors[0]
    if busy:
        raise TransportError(f"{name_workers(busy)} still ran after {timeout_seconds} s")
    return [results[rank] for rank in range(world.num_workers)]
