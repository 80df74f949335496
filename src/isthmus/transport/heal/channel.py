"""Messages between a joiner and a donor: JSON, each with its length before it, and raw bytes.

The connection is the link's, which encrypts, and lets in only workers that are trusted.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from isthmus.transport.base import TransportError

_LENGTH_BYTES = 4


class Channel:
    """One end of a connection.

    `patience` returns the seconds that the next call on the connection may wait, and raises `TimeoutError` where none
    are left.

    Every method raises `OSError` when the connection breaks, `TimeoutError` (one of them) when it makes no progress,
    and `TransportError` when the other end does not keep to the rules.
    """

    def __init__(self, connection: socket.socket, patience: Callable[[], float]) -> None:
        self._connection, self.patience = connection, patience

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of plain values."""
        self.send_text(json.dumps(message).encode())

    def send_text(self, text: bytes) -> None:
        """Send a message that is JSON already."""
        self.send_raw([memoryview(len(text).to_bytes(_LENGTH_BYTES, "big") + text)])

    def receive(self, max_bytes: int) -> dict[str, Any]:
        """Return the next message, of at most `max_bytes`."""
        try:
            message = json.loads(self.receive_text(max_bytes))
        except (ValueError, RecursionError) as error:
            raise TransportError("it sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise TransportError("it sent a message that is not a dict")
        return message

    def receive_text(self, max_bytes: int) -> bytes:
        """Return the next message as it was sent."""
        size = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if size > max_bytes:
            raise TransportError(f"it sent a message of {size} bytes where {max_bytes} are allowed")
        return self._read(size)

    def send_raw(self, views: Iterable[memoryview]) -> None:
        """Send bytes as they are; patience is for each piece of progress, not for the whole (as in `sendall`)."""
        for rest in views:
            while rest:
                self._connection.settimeout(self.patience())
                rest = rest[self._connection.send(rest) :]

    def receive_raw(self, into: memoryview) -> None:
        """Fill `into` with bytes as they come."""
        while into:
            self._connection.settimeout(self.patience())
            received = self._connection.recv_into(into)
            if received == 0:
                raise ConnectionResetError("the connection broke")
            into = into[received:]

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        self.receive_raw(memoryview(buffer))
        return bytes(buffer)


def shut_down(connection: socket.socket) -> None:
    """End a connection on which another thread may be waiting: that thread gets an `OSError`."""
    with suppress(OSError):  # it has ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would go on in the clear
