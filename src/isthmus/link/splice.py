"""Bytes passed on between pairs of connections as they come: one thread for all pairs, which reads nothing in them."""

from __future__ import annotations

import resource
import selectors
import socket
import threading
import time
from contextlib import suppress
from functools import partial

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_BUFFER_BYTES = 1 << 18
_HALF_OPEN_SECONDS = 10.0  # after which a pair ends of which one end has ended
_LOOK_SECONDS = 0.2
_PAUSE_SECONDS = 0.02
_MANY = 1 << 16  # descriptors, where there is no limit


class _End:
    """One of two connections, and what it does not take yet of what came from the other."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unsent = b""
        self.has_ended = False  # nothing more comes from it
        self.other = self

    def send(self, data: memoryview | bytes) -> None:
        """Send as much as can be sent at once, and keep the rest; when all is sent, the end of it, too."""
        try:
            sent = self.connection.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        self.unsent = bytes(data[sent:])
        if not self.unsent and self.other.has_ended:
            self.connection.shutdown(socket.SHUT_WR)


class Splices:
    """Pairs of connections: what comes from one goes to the other.

    A connection is read only while the other one of its pair takes what comes, so a pair holds one buffer each way at
    the most. There are at most as many pairs as take half of the descriptors that this process may open.
    """

    def __init__(self) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_pairs = (_MANY if descriptors == resource.RLIM_INFINITY else descriptors) // 4
        self._lock = threading.Lock()
        self._ends: dict[_End, float] = {}  # and when, at the latest, those end whose other end has
        self._selector = selectors.DefaultSelector()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are as many pairs as there may be."""
        return len(self._ends) >= 2 * self._max_pairs

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Pass on what comes from one connection to the other until both have ended; they are closed then."""
        ends = _End(one), _End(other)
        for end in ends:
            end.connection.setblocking(False)
            end.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends[0].other, ends[1].other = ends[1], ends[0]
        with self._lock:
            if self._closed:
                one.close()
                other.close()
                return
            for end in ends:
                self._ends[end] = float("inf")
                self._selector.register(end.connection, _READ, partial(self._serve, end))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="isthmus-splice", daemon=True)
                self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """End all pairs, those that are in use after so many seconds at most. A second call does nothing."""
        until = time.monotonic() + seconds
        while self._ends and not self._closed and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for end in list(self._ends):
                self._end(end)
            self._selector.close()

    def _run(self) -> None:
        look_at = time.monotonic() + _LOOK_SECONDS
        while not self._closed:
            ready = self._selector.select(_LOOK_SECONDS)
            with self._lock:
                for key, events in ready:
                    key.data(events)
                now = time.monotonic()
                if now > look_at:
                    look_at = now + _LOOK_SECONDS
                    for end in [end for end, latest in self._ends.items() if latest < now]:
                        self._end(end)

    def _serve(self, end: _End, events: int) -> None:
        if end not in self._ends:
            return  # it has ended together with the other one
        try:
            if events & _WRITE:
                end.send(end.unsent)
            if events & _READ and not end.other.unsent:
                self._pass_on(end)
            if end.has_ended and end.other.has_ended and not end.unsent and not end.other.unsent:
                self._end(end)
            else:
                self._watch(end)
                self._watch(end.other)
        except OSError:
            self._end(end)

    def _pass_on(self, end: _End) -> None:
        try:
            num_bytes = end.connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        if num_bytes == 0:
            end.has_ended = True
            self._ends[end] = self._ends[end.other] = time.monotonic() + _HALF_OPEN_SECONDS
        end.other.send(self._buffer[:num_bytes])

    def _watch(self, end: _End) -> None:
        events = (_WRITE if end.unsent else 0) | (0 if end.has_ended or end.other.unsent else _READ)
        key = self._selector.get_map().get(end.connection)
        if key is None and events:
            self._selector.register(end.connection, events, partial(self._serve, end))
        elif key is not None and not events:
            self._selector.unregister(end.connection)
        elif key is not None and key.events != events:
            self._selector.modify(end.connection, events, key.data)

    def _end(self, end: _End) -> None:
        """End both connections of a pair."""
        for each in (end, end.other):
            if self._ends.pop(each, None) is not None:
                with suppress(KeyError):
                    self._selector.unregister(each.connection)
                each.connection.close()
