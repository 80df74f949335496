"""What every candidate does: two peers, S connections, a message each way at once, into memory that is there."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

HEADER = struct.Struct("<IQI")  # number of the message, offset within it, length of the chunk
WAIT_SECONDS = 30


@dataclass(frozen=True)
class Meeting:
    """Where the two peers find each other.

    Attributes:
        rank: 0 listens, 1 dials.
        addresses: of both.
        port: that rank 0 listens on.
        folder: both read it; it holds the keys.
        num_connections: S.
    """

    rank: int
    addresses: tuple[str, str]
    port: int
    folder: Path
    num_connections: int


class Link(Protocol):
    """S connections to the other peer."""

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another of a size known before; raise when the link ends meanwhile."""

    def abort(self) -> None:
        """End the link at once, from any thread: an exchange under way raises and every descriptor is closed."""


def chunks_of(message: memoryview, number: int, chunk_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    """Cut a message into chunks, each with its header."""
    for offset in range(0, len(message), chunk_bytes):
        chunk = message[offset : offset + chunk_bytes]
        yield HEADER.pack(number, offset, len(chunk)), chunk


class Inbox:
    """The message that is received, for libraries that hand over chunks as bytes of their own."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._number = 0
        self._incoming = memoryview(b"")
        self._missing_bytes = 0
        self._early: deque[tuple[bytes, bytes | memoryview]] = deque()  # chunks of the message after this one
        self._error: BaseException | None = None

    def open(self, number: int, incoming: memoryview) -> None:
        """Say where the message of this number goes."""
        with self.changed:
            self._number, self._incoming, self._missing_bytes = number, incoming, len(incoming)
            for _ in range(len(self._early)):
                self.place(*self._early.popleft())

    def place(self, header: bytes, payload: bytes | memoryview) -> None:
        """Copy a chunk to where it belongs, or keep it when the other peer is one message ahead."""
        number, offset, length = HEADER.unpack(header)
        with self.changed:
            if number == self._number + 1:
                self._early.append((header, payload))
                return
            if number != self._number or length != len(payload) or offset + length > len(self._incoming):
                raise ConnectionError(f"The other peer sent a chunk that fits nowhere: {number}, {offset}, {length}.")
            self._incoming[offset : offset + length] = payload
            self._missing_bytes -= length
            if not self._missing_bytes:
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have the exchange under way, and those to come, raise."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def is_full(self) -> bool:
        """Whether the whole message is here; raises when it will never be."""
        if self._error is not None:
            raise ConnectionError(f"The link has ended: {self._error}") from self._error
        return not self._missing_bytes

    def wait(self) -> None:
        """Wait until the whole message is here."""
        with self.changed:
            if not self.changed.wait_for(self.is_full, WAIT_SECONDS):
                raise ConnectionError(f"The message did not come within {WAIT_SECONDS} seconds.")
