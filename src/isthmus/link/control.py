"""A connection over which two links tell each other small things, with heartbeats: JSON, a line each."""

from __future__ import annotations

import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_MAX_LINE_BYTES = 1 << 10


class Control:
    """One end of such a connection, which one thread reads and any may write to.

    Args:
        connection: after its handshake.
        beat_seconds: between two heartbeats.
        patience_seconds: after so much silence the other end counts as gone.
    """

    def __init__(self, connection: ssl.SSLSocket, beat_seconds: float, patience_seconds: float) -> None:
        self._connection, self._lock = connection, threading.Lock()  # TLS takes one call at a time
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        connection.setblocking(False)

    def tell(self, **message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken, or the other end does not read.
        """
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the other end tells, for as long as the connection lives.

        Raises:
            OSError: it broke, was closed, or is silent.
            ValueError: what came is no message.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        unread, heard_at, beat_at = b"", time.monotonic(), 0.0
        while True:
            if time.monotonic() >= beat_at:
                self.tell()
                beat_at = time.monotonic() + self._beat_seconds
            came = self._receive()
            if not came:
                if time.monotonic() > heard_at + self._patience_seconds:
                    raise TimeoutError("it is silent")
                poll.poll(1000 * self._beat_seconds)
                continue
            heard_at = time.monotonic()
            *lines, unread = (unread + came).split(b"\n")
            if len(unread) > _MAX_LINE_BYTES:
                raise ValueError("a message is too long")
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("a message is no dict")
                if message:
                    yield message

    def end(self) -> None:
        """End the connection: whoever reads its messages gets an `OSError`, and closes it."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # that of TLS would go on in the clear

    def _receive(self) -> bytes:
        with self._lock:
            try:
                came = self._connection.recv(_MAX_LINE_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return b""
        if not came:
            raise ConnectionResetError("the connection was closed")
        return came
