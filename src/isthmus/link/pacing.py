"""A bound on what the lanes to one member send together, where they send more than the way takes.

A connection that goes by Linux's BBR sends at the highest rate that it has seen in ten round trips, whatever is lost.
One that was alone for a moment has seen the whole way's rate, so four together overrun the buffer of the narrowest
place: at 300 ms a quarter of all bytes was lost and sent again. As BBR's third version does for one connection (IETF
draft-ietf-ccwg-bbr: bounds from loss), the lanes slow down together when too much is lost, and probe for more while
nothing is. The kernel keeps the bound with the connection, for the next group, too.
"""

from __future__ import annotations

import math
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_MAX_LOST = 0.05  # of the bytes that are sent: more is taken for an overrun buffer, less for a noisy line
_HEADROOM = 1.05  # of the bound, above what arrived
_USED = 0.93  # of the bound, where it is what limits: BBR stays 4 % below it on average
_FIRST_STEP, _LARGEST_STEP = 0.05, 1.0  # by which the bound grows, twice as much each time
_WINDOWS = 3  # the median of which says what arrives: acknowledgements come in bursts, and BBR's lanes pause in turn
_SHORTEST_SECONDS = 0.05  # of a window, else a round trip

_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux alone
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE of Linux, in bytes a second
_UNBOUND = (1 << 64) - 1
_INFO = struct.Struct("=16xI48xI40xQ72xI4xQQ")  # of struct tcp_info, linux/tcp.h (4.19 and later)


class _Info(NamedTuple):
    """What the kernel tells of a connection."""

    segment_bytes: int
    round_trip_us: int
    max_rate: int  # bytes a second
    num_delivered: int  # segments that the other end has, modulo 2^32
    bytes_sent: int  # resent ones, too
    bytes_resent: int


class Pacing:
    """What the lanes to one member send together, window by window while there is something to be sent."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOWS)  # bytes a second that arrived
        self._step = _FIRST_STEP
        self.begin()

    def begin(self) -> None:
        """Begin a new window: nothing was to be sent before."""
        self._connections: list[socket.socket] = []
        self._before: list[_Info] = []
        self._began_at, self._seconds, self._is_first = 0.0, 0.0, True

    def look(self, connections: Sequence[socket.socket]) -> None:
        """Bound the rate anew at the end of a window. It is called when more is about to be sent, never in a pause."""
        now = time.monotonic()
        if now < self._began_at + self._seconds or _TCP_INFO is None:
            return
        connections = list(connections)
        infos = [info for connection in connections if (info := _read(connection, _TCP_INFO)) is not None]
        if not infos or len(infos) < len(connections):
            return
        if connections == self._connections:
            bound = _bound(infos)
            new = self._judge(self._before, infos, now - self._began_at, bound)
            if new != bound:
                for connection in connections:
                    rate = struct.pack("=Q", round(new / len(connections)))
                    connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)
        self._connections, self._before, self._began_at = connections, infos, now
        self._seconds = max(_SHORTEST_SECONDS, *(info.round_trip_us / 1e6 for info in infos))

    def _judge(self, before: Sequence[_Info], infos: Sequence[_Info], seconds: float, bound: float) -> float:
        """Return the bound from now on, in bytes a second."""
        arrived = sent = resent = 0
        for old, new in zip(before, infos, strict=True):
            arrived += ((new.num_delivered - old.num_delivered) % (1 << 32)) * new.segment_bytes
            sent += new.bytes_sent - old.bytes_sent
            resent += new.bytes_resent - old.bytes_resent
        if not self._is_first:  # for a round trip nothing arrives
            self._rates.append(arrived / seconds)
        self._is_first = False
        rate = statistics.median(self._rates or [0.0])
        if rate and resent > _MAX_LOST * sent:
            self._step = _FIRST_STEP
            return _HEADROOM * rate
        if len(self._rates) < _WINDOWS or math.isinf(bound):
            return bound
        if rate < _USED * bound:
            self._step = _FIRST_STEP
            return bound
        step, self._step = self._step, min(2 * self._step, _LARGEST_STEP)
        self._rates.clear()
        return bound * (1 + step)


def _bound(infos: Sequence[_Info]) -> float:
    return sum(math.inf if info.max_rate == _UNBOUND else info.max_rate for info in infos)


def _read(connection: socket.socket, option: int) -> _Info | None:
    """Return what the kernel tells; None where it is too old to tell all, or the connection is gone."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, option, _INFO.size)
    except OSError:
        return None
    return _Info(*_INFO.unpack(told)) if len(told) == _INFO.size else None
