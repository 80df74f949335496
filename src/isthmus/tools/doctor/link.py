"""One pair of workers: round trip, bandwidth in both directions, and how far their clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from isthmus.core.types import Peers
from isthmus.transport import TransportError

Clock = Callable[[], float]
_PINGS = 15
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_SECONDS = 0.25  # of a transfer, for what it shows to be the bandwidth
_LONG_ENOUGH_ROUND_TRIPS = 10  # TCP takes some to find its pace
_END = -1


@dataclass(frozen=True)
class Link:
    """What one worker found out about its way to another."""

    here: str
    there: str
    round_trip_seconds: float  # median
    up_bytes_per_second: float  # from here to there
    down_bytes_per_second: float
    ahead_seconds: float  # of the clock there against the one here; known to half a round trip

    @property
    def slowest_bytes_per_second(self) -> float:
        """In the slower direction."""
        return min(self.up_bytes_per_second, self.down_bytes_per_second)


def measure(peers: Peers, here: str, there: str, now: Clock, longest_seconds: float) -> Link:
    """Rank 0 of a pair measures, and rank 1 answers, by `answer`.

    Args:
        peers: two.
        here: name of rank 0.
        there: name of rank 1.
        now: this machine's wall clock, seconds.
        longest_seconds: a transfer that takes so long is not followed by a larger one.
    """
    pings = [_ask(peers, 0, 0, now) for _ in range(_PINGS)]
    round_trip = median(seconds for seconds, _ in pings)
    enough = min(max(_LONG_ENOUGH_SECONDS, _LONG_ENOUGH_ROUND_TRIPS * round_trip), longest_seconds)
    up = _bandwidth(lambda count: _ask(peers, count, 0, now)[0], round_trip, enough)
    down = _bandwidth(lambda count: _ask(peers, 0, count, now)[0], round_trip, enough)
    _send(peers, [torch.tensor([_END, _END])])
    return Link(here, there, round_trip, up, down, min(pings)[1])


def answer(peers: Peers, now: Clock) -> None:
    """Rank 1 of a pair does what rank 0 asks for."""
    while True:
        up, down = _receive(peers, [torch.zeros(2, dtype=torch.int64)])[0].tolist()
        if up == _END:
            return
        if not (0 <= up <= _MOST_BYTES and 0 <= down <= _MOST_BYTES):
            raise TransportError(
                f"the other worker asks for transfers of {up} and {down} bytes: is it another isthmus?"
            )
        if up:
            _receive(peers, [_bytes(up)])
        _send(peers, [torch.tensor([now()], dtype=torch.float64), _bytes(down)])


def _ask(peers: Peers, up_bytes: int, down_bytes: int, now: Clock) -> tuple[float, float]:
    """Send so much, get so much; seconds it took, and seconds by which the other's clock is ahead (as in NTP)."""
    clock, began = now(), time.perf_counter()
    _send(peers, [torch.tensor([up_bytes, down_bytes])])
    if up_bytes:
        _send(peers, [_bytes(up_bytes)])
    other = _receive(peers, [torch.zeros(1, dtype=torch.float64), _bytes(down_bytes)])[0].item()
    seconds = time.perf_counter() - began
    return seconds, other - (clock + seconds / 2)


def _bandwidth(transfer: Callable[[int], float], round_trip_seconds: float, enough_seconds: float) -> float:
    """Bytes a second of the first transfer that takes long enough; each is four times the one before."""
    count = _FIRST_BYTES
    while (seconds := transfer(count)) < enough_seconds and count < _MOST_BYTES:
        count *= 4
    return count / max(seconds - round_trip_seconds, seconds / 10)


def _send(peers: Peers, message: list[torch.Tensor]) -> None:
    parts: list[list[torch.Tensor]] = [[], []]
    parts[1 - peers.rank] = message
    peers.all_to_all(parts)


def _receive(peers: Peers, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts: list[list[torch.Tensor]] = [[], []]
    parts[peers.rank] = like
    return peers.all_to_all(parts)[1 - peers.rank]


def _bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)
