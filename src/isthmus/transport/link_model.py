"""The seconds that collectives take on modelled links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.core.types import UserError
from isthmus.link.lane import num_bulk_lanes

CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all", "rendezvous"]
PerLink = float | Sequence[Sequence[float]]  # one value for all links, or one per [sender][receiver]
WINDOW_BYTES = 2.5e6  # that one TCP connection moves in a round trip between cloud machines with Linux's defaults
_RENDEZVOUS_TRIPS = 2  # one-way, in an elastic world: a question and its answer


@dataclass(frozen=True)
class Collective:
    """A collective as all ranks called it together.

    Attributes:
        kind: of it; the rendezvous of an elastic world counts as one.
        num_bytes: by [rank][receiver] that rank's part for each receiver in an all-to-all; else [rank][0] its buffer.
    """

    kind: CollectiveKind
    num_bytes: Sequence[Sequence[int]]


@dataclass(frozen=True)
class LinkModel:
    """The bandwidth, latency and windows of every link, [sender][receiver]. Links do not slow each other down.

    A worker sends one message at a time and receives one at a time (its uplink and its downlink are what is slow).
    Everybody sends straight to everybody, as over `isthmus.link`, which opens more connections where the way is longer:
    together they move at most a window each in a round trip.
    """

    bandwidth: Sequence[Sequence[float]]  # bits per second
    latency: Sequence[Sequence[float]]  # seconds, one way
    window_bytes: float = math.inf  # of one connection

    @classmethod
    def between(
        cls,
        num_workers: int,
        bandwidth_bits_per_second: PerLink | None,
        latency_seconds: PerLink = 0.0,
        window_bytes: float | None = None,
    ) -> LinkModel:
        """Return the model of all links between `num_workers`; a bandwidth or window of None is infinite."""
        bandwidth = math.inf if bandwidth_bits_per_second is None else bandwidth_bits_per_second
        window_bytes = math.inf if window_bytes is None else window_bytes
        if not window_bytes > 0:
            raise UserError(f"window_bytes is {window_bytes:g}: it should be above 0")
        return cls(
            _matrix("bandwidth", bandwidth, num_workers), _matrix("latency", latency_seconds, num_workers), window_bytes
        )

    @classmethod
    def even(cls, num_workers: int, megabits_per_second: float, round_trip_ms: float) -> LinkModel:
        """Return the model of equal links with the windows that are usual."""
        return cls.between(num_workers, 1e6 * megabits_per_second, round_trip_ms / 2e3, WINDOW_BYTES)

    def round_trip_seconds(self, a: int, b: int) -> float:
        """Return the seconds to another rank and back."""
        return self.latency[a][b] + self.latency[b][a]

    def rate(self, sender: int, receiver: int, num_connections: int | None = None) -> float:
        """Return the bits per second that so many connections move; None: as many as the link opens."""
        round_trip = self.round_trip_seconds(sender, receiver)
        if round_trip == 0 or self.window_bytes == math.inf:
            return self.bandwidth[sender][receiver]
        num_connections = num_bulk_lanes(round_trip) if num_connections is None else num_connections
        return min(self.bandwidth[sender][receiver], num_connections * 8 * self.window_bytes / round_trip)

    def seconds(self, collective: Collective) -> float:
        """Return the seconds of a collective that all ranks begin at the same moment."""
        kind, sizes = collective.kind, collective.num_bytes
        if kind == "rendezvous":
            return _RENDEZVOUS_TRIPS * self._longest()
        if kind == "all_to_all":
            return self.exchange_seconds(lambda sender, receiver: sizes[sender][receiver])
        if kind == "all_gather":
            return self.exchange_seconds(lambda sender, receiver: sizes[sender][0])
        return self._all_reduce_seconds(sizes[0][0])

    def exchange_seconds(self, num_bytes: Callable[[int, int], float], num_connections: int | None = None) -> float:
        """Return the seconds in which every rank sends `num_bytes(sender, receiver)` straight to every other one."""
        latency = max((self.latency[a][b] for a, b in self._pairs() if num_bytes(a, b)), default=0.0)
        return self._busiest_seconds(num_bytes, num_connections) + latency

    def _all_reduce_seconds(self, num_bytes: int) -> float:
        """Return the seconds of two shots, each of one part to or from its owner.

        The sums of the first bytes cross while the last parts come in: the second shot begins when the line is free
        and the last part has come.
        """
        shot = self._busiest_seconds(lambda sender, receiver: num_bytes / len(self.latency))
        return shot + max(shot, self._longest()) + self._longest()

    def _busiest_seconds(self, num_bytes: Callable[[int, int], float], num_connections: int | None = None) -> float:
        """Return the seconds for which the busiest uplink or downlink sends or receives."""
        ranks = range(len(self.latency))
        taken = [
            [8 * num_bytes(a, b) / self.rate(a, b, num_connections) if a != b else 0.0 for b in ranks] for a in ranks
        ]
        up = [math.fsum(row) for row in taken]
        down = [math.fsum(column) for column in zip(*taken, strict=True)]
        return max(up + down)

    def _longest(self) -> float:
        return max((self.latency[a][b] for a, b in self._pairs()), default=0.0)

    def _pairs(self) -> list[tuple[int, int]]:
        ranks = range(len(self.latency))
        return [(sender, receiver) for sender in ranks for receiver in ranks if sender != receiver]


def _matrix(name: str, value: PerLink, size: int) -> Sequence[Sequence[float]]:
    if isinstance(value, (int, float)):
        return [[float(value)] * size for _ in range(size)]
    if len(value) != size or any(len(row) != size for row in value):
        raise UserError(f"{name}: give one number, or {size} rows of {size} (sender x receiver)")
    return value
