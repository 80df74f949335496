"""Measuring the way between the workers, by the collectives that syncs are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low

import torch

from isthmus.core.types import Peers

Clock = Callable[[], float]
_NUM_PINGS = 15
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_SECONDS = 0.25  # of a transfer, for what it shows to be the bandwidth
_LONG_ENOUGH_ROUND_TRIPS = 10  # TCP takes some to find its pace


@dataclass(frozen=True)
class Network:
    """The network between the workers, as all of them have measured it together; lists are in rank order."""

    round_trip_seconds: float  # of a small all_gather, on the worker that waits the longest
    clocks_ahead_seconds: list[float]  # of the middle clock; known to a round trip
    download_bytes_per_second: list[float]  # by a worker to which all others send at once


def measure(peers: Peers, now: Clock, longest_seconds: float) -> Network:
    """Measure the network; all peers, at least two, call this at the same time.

    A transfer that takes `longest_seconds` is not followed by a larger one; `now` is this machine's wall clock.
    """
    round_trip = max(_gather(peers, median(_ping(peers) for _ in range(_NUM_PINGS))))
    clocks = _gather(peers, now())  # the collective before this one has ended at about the same moment everywhere
    enough_seconds = min(max(_LONG_ENOUGH_SECONDS, _LONG_ENOUGH_ROUND_TRIPS * round_trip), longest_seconds)
    downloads = [_download(peers, receiver, round_trip, enough_seconds) for receiver in range(peers.size)]
    return Network(round_trip, [clock - median_low(clocks) for clock in clocks], downloads)


def _ping(peers: Peers) -> float:
    begin = time.perf_counter()
    _gather(peers, 0.0)
    return time.perf_counter() - begin


def _gather(peers: Peers, value: float) -> list[float]:
    return [float(theirs) for (theirs,) in peers.all_gather([torch.tensor([value], dtype=torch.float64)])]


def _download(peers: Peers, receiver: int, round_trip_seconds: float, enough_seconds: float) -> float:
    """Return the bytes a second at which one worker receives, by the first transfer that takes long enough."""
    num_bytes = _FIRST_BYTES
    while True:
        parts = [[torch.zeros(num_bytes * (rank == receiver), dtype=torch.uint8)] for rank in range(peers.size)]
        begin = time.perf_counter()
        peers.all_to_all(parts)
        seconds = max(_gather(peers, time.perf_counter() - begin))
        if seconds >= enough_seconds or num_bytes >= _MOST_BYTES // peers.size:
            return num_bytes * (peers.size - 1) / max(seconds - round_trip_seconds, seconds / 10)
        num_bytes *= 4
