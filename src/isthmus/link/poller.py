"""Which connections can be read or written now: one thread has them looked after, all with one lock."""

from __future__ import annotations

import selectors
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from isthmus.link.lane import Lane

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Serve = Callable[[int], None]  # is told what can be done


class Poller:
    """The connections that are watched, and who looks after each.

    All methods but `wake` and `wait` want the lock of the link.

    Args:
        look: looks at everything, after a `wake`.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._selector = selectors.DefaultSelector()
        self._unread: dict[ssl.SSLSocket, Serve] = {}  # the network will not tell that there is more
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, READ, self._wake_up)

    def wake(self) -> None:
        """Have everything looked at soon. Any thread may call it."""
        with suppress(OSError):  # it is awake, or has ended
            self._wakeup_sender.send(b"\0")

    def wait(self, seconds: float) -> list[Callable[[], None]]:
        """Return what is to be called with the lock, as soon as there is something, or so much time is over."""
        ready = self._selector.select(0 if self._unread else max(0.0, seconds))
        return [partial(key.data, events) for key, events in ready]

    def serve_unread(self) -> None:
        """Have those looked after of which the network will not tell that there is more to be read."""
        for connection, serve in list(self._unread.items()):
            if connection in self._unread:
                serve(READ)

    def serve(self, lane: Lane, events: int, again: Serve) -> None:
        """Read and write what a lane can now, and have it looked after again when it can more.

        Raises:
            OSError, Misbehaviour: see `Lane`.
        """
        if events & READ:
            if lane.read():
                self.serve_soon(lane.connection, again)
            else:
                self._unread.pop(lane.connection, None)
        wants_write = lane.write()
        interest = (0 if lane.is_parked or lane.has_ended else READ) | (WRITE if wants_write else 0)
        self.watch(lane.connection, interest, again)

    def serve_soon(self, connection: ssl.SSLSocket, serve: Serve) -> None:
        """Have a connection looked after, without waiting for the network: TLS may hold what has come."""
        self._unread[connection] = serve

    def watch(self, connection: ssl.SSLSocket, interest: int, serve: Serve) -> None:
        """Have a connection looked after when it can be read or written, or both, or neither."""
        key = self._selector.get_map().get(connection)
        if key is None and interest:
            self._selector.register(connection, interest, serve)
        elif key is not None and not interest:
            self._selector.unregister(connection)
        elif key is not None and key.events != interest:
            self._selector.modify(connection, interest, serve)

    def unwatch(self, connection: ssl.SSLSocket) -> None:
        """Look after a connection no more."""
        self._unread.pop(connection, None)
        with suppress(KeyError, ValueError):  # it is not watched, or is closed
            self._selector.unregister(connection)

    def close(self) -> None:
        """End; nothing is watched any more."""
        self._selector.close()
        self._wakeup.close()
        self._wakeup_sender.close()

    def _wake_up(self, events: int) -> None:
        with suppress(BlockingIOError):
            self._wakeup.recv(1 << 12)
        self._look()
