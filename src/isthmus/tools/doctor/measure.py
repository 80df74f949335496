"""Measuring the links between the workers, pair by pair, over the connections that syncs take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low

import torch

from isthmus.transport.link_model import LinkModel
from isthmus.transport.peers import BufferPeers

Clock = Callable[[], float]
Pair = tuple[int, int]  # sender and receiver
PerPair = list[list[float]]  # [sender][receiver]
_NUM_PINGS = 7
_FIRST_BYTES, _MOST_BYTES = 1 << 14, 1 << 26
_TRANSFER_SECONDS, _TRANSFER_ROUND_TRIPS = 1.0, 5  # about which a transfer should take: TCP has to find its pace
_MOST_SECONDS = 60.0  # about which all transfers together should take; a round has ten or so
_UNEVEN = 16  # times as fast as the other one a direction may be, and the first transfer back takes no longer
_GROWTH = 8.0  # of a transfer over the one before, at most
_FASTER = 1.25  # than before, for a transfer after which another one is made
_LEAST_LONG, _MOST_LONG = 3, 6  # transfers of a pair in one direction that take as long as wanted


@dataclass(frozen=True)
class Network:
    """The network between the workers, as all of them have measured it together; in rank order."""

    clocks_ahead_seconds: list[float]  # of the middle clock; known to a round trip
    round_trip_seconds: PerPair  # the same both ways
    num_connections: PerPair  # for large messages, each way
    one_connection_rate: PerPair  # bytes a second
    rate: PerPair  # bytes a second over all connections

    @property
    def links(self) -> LinkModel:
        """The model of these links."""
        return LinkModel(
            [[8 * rate for rate in row] for row in self.rate],
            [[seconds / 2 for seconds in row] for row in self.round_trip_seconds],
        )

    @property
    def pairs(self) -> list[Pair]:
        """All senders and receivers."""
        ranks = range(len(self.rate))
        return [(sender, receiver) for sender in ranks for receiver in ranks if sender != receiver]


def measure(peers: BufferPeers, now: Clock, longest_seconds: float, timer: Clock = time.perf_counter) -> Network:
    """Measure the network; all peers, at least two, call this at the same time.

    Pairs that share no worker are measured at the same moment, each direction for itself. A message grows until it
    takes about a second, so a slow link carries little.

    Args:
        peers: of one sync.
        now: this machine's wall clock.
        longest_seconds: that a transfer should take, also where that is too short for a good measurement.
        timer: the clock of what is measured.
    """
    size = peers.size
    _gather(peers, [0.0])
    clocks = [clock for (clock,) in _gather(peers, [now()])]  # the collective before has ended at about the same moment
    rounds = _tournament(size)
    seconds = min(_TRANSFER_SECONDS, longest_seconds, _MOST_SECONDS / (8 * len(rounds)))
    round_trips, one, every = (_none(size) for _ in range(3))
    connections = _gather(peers, [float(peers.connections_to(r)) if r != peers.rank else 0 for r in range(size)])
    for pairs in rounds:
        _ping(peers, pairs, round_trips, timer)
        first = dict.fromkeys(pairs, _FIRST_BYTES)
        for _ in ("forth", "back"):
            wanted = {
                (a, b): min(longest_seconds, max(seconds, _TRANSFER_ROUND_TRIPS * round_trips[a][b])) for a, b in first
            }
            sizes = _measure_rates(peers, first, wanted, round_trips, None, every, timer)
            several = {(a, b): _share(sizes[a, b], connections[a][b]) for a, b in first if connections[a][b] > 1}
            _measure_rates(peers, several, wanted, round_trips, 1, one, timer)
            for a, b in first.keys() - several.keys():
                one[a][b] = every[a][b]
            first = {(b, a): _share(sizes[a, b], _UNEVEN) for a, b in first}
    ahead = [clock - median_low(clocks) for clock in clocks]
    return Network(ahead, round_trips, connections, one, every)


def _ping(peers: BufferPeers, pairs: list[Pair], round_trips: PerPair, timer: Clock) -> None:
    """Measure the round trips of pairs, from the first one's side."""
    forth, back = dict.fromkeys(pairs, 1), {(b, a): 1 for a, b in pairs}
    taken = []
    for _ in range(_NUM_PINGS):
        begin = timer()
        _exchange(peers, forth)
        _exchange(peers, back)
        taken.append(timer() - begin)
    of_ranks = _gather(peers, [median(taken)])
    for a, b in pairs:
        round_trips[a][b] = round_trips[b][a] = of_ranks[a][0]


def _measure_rates(
    peers: BufferPeers,
    first: dict[Pair, int],
    wanted: dict[Pair, float],
    round_trips: PerPair,
    num_connections: int | None,
    rates: PerPair,
    timer: Clock,
) -> dict[Pair, int]:
    """Measure the bytes a second from senders to receivers, beginning with `first` bytes; returns the last ones'.

    A transfer should take at least half the wanted seconds, and is made again until TCP has found its pace: over all
    connections, before some of them are measured alone. The fastest counts. A receiver says when it is ready, and
    waits for what is sent then: that takes the round trip on top.
    """
    sizes, num_long, last = dict(first), dict.fromkeys(first, 0), dict[Pair, int]()
    while sizes:
        begin = timer()
        _exchange(peers, {(b, a): 1 for a, b in sizes})
        _exchange(peers, sizes, num_connections)
        taken = _gather(peers, [timer() - begin])
        for pair, size in list(sizes.items()):
            a, b = pair
            whole = taken[b][0]
            seconds = max(whole - round_trips[a][b], whole / 10, 1e-9)
            sizes[pair] = min(_MOST_BYTES, int(size * min(_GROWTH, max(1.0, wanted[pair] / seconds))))
            if seconds < wanted[pair] / 2 and size < _MOST_BYTES:
                continue
            former, rates[a][b] = rates[a][b], max(rates[a][b], size / seconds)
            num_long[pair] += 1
            is_steady = num_long[pair] >= _LEAST_LONG and size / seconds < _FASTER * former
            needs_no_pace = size <= _FIRST_BYTES or size >= _MOST_BYTES or num_connections is not None
            if is_steady or needs_no_pace or num_long[pair] == _MOST_LONG:
                last[pair] = size
                del sizes[pair]
    return last


def _share(size: int, divisor: float) -> int:
    return max(_FIRST_BYTES, int(size / divisor))


def _exchange(peers: BufferPeers, sizes: dict[Pair, int], num_connections: int | None = None) -> None:
    """Send so many bytes from each sender to each receiver; everybody takes part."""
    ranks, own = range(peers.size), peers.rank
    outgoing = [torch.zeros(sizes.get((own, to), 0), dtype=torch.uint8) for to in ranks]
    incoming = [torch.zeros(sizes.get((sender, own), 0), dtype=torch.uint8) for sender in ranks]
    peers.exchange(outgoing, incoming, num_connections)


def _gather(peers: BufferPeers, values: list[float]) -> PerPair:
    return [theirs.tolist() for (theirs,) in peers.all_gather([torch.tensor(values, dtype=torch.float64)])]


def _none(size: int) -> PerPair:
    return [[0.0] * size for _ in range(size)]


def _tournament(size: int) -> list[list[Pair]]:
    """Return rounds in which every rank meets at most one other, and in all of them together each one once."""
    ranks = [*range(size), *([-1] if size % 2 else [])]  # -1: a round's rest
    rounds = []
    for _ in range(len(ranks) - 1):
        opposite = zip(ranks[: len(ranks) // 2], reversed(ranks), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in opposite if -1 not in pair])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds
