"""One TLS connection to a peer: frames out, frames in, never waiting. It belongs to the thread of its `Link`."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Literal, NamedTuple, Protocol

from isthmus.link.errors import Misbehaviour

_HEADER = struct.Struct("!B3xIIQ")
HEADER_BYTES = _HEADER.size
CHUNK_BYTES = 1 << 18  # of a message in one frame
MAX_CONTROL_BYTES = 1 << 12
MAX_LANES = 4  # in each direction, beside the one for small messages
_LONG_WAY_SECONDS = 0.015  # at 20 ms four lanes get 75 to 95 % of 1,000 Mbit/s both ways at once, one lane 70
_TURN_BYTES = 1 << 20  # after which another lane has its turn
_UNSENT_BYTES = 1 << 18  # in the kernel: what waits there cannot go over another lane

SCRATCH = memoryview(bytearray(CHUNK_BYTES))  # where goes what nobody wants any more

HELLO, BEAT, DATA, BYE = 1, 2, 3, 4

Load = Literal["small", "bulk", "nothing"]  # what a lane sends: heartbeats and small messages, large ones, or neither


def num_bulk_lanes(round_trip_seconds: float) -> int:
    """Return how many connections carry large messages in each direction of so long a way."""
    return MAX_LANES if round_trip_seconds > _LONG_WAY_SECONDS else 1


class Frame(NamedTuple):
    """The header of what is sent in one piece."""

    kind: int
    num_bytes: int
    message: int = 0  # its number, of DATA
    offset: int = 0  # of these bytes in the message

    def pack(self) -> bytes:
        """Return the header as it is sent."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, header: bytes | bytearray) -> Frame:
        """Return the frame that a header announces."""
        return cls(*_HEADER.unpack(header))


class Traffic(Protocol):
    """Where a lane gets its frames from, and where what it reads goes."""

    def next_frame(self, load: Load) -> tuple[Frame, memoryview] | None:
        """Return what a lane with this load is to send next; None where there is nothing."""
        ...

    def written(self, frame: Frame) -> None:
        """Note that a frame is on its way."""
        ...

    def place(self, frame: Frame) -> memoryview | None:
        """Return the memory for the bytes of a frame; None while nobody has asked for its message."""
        ...

    def read(self, frame: Frame, payload: memoryview) -> None:
        """Note that the bytes of a frame are there."""
        ...


class Lane:
    """A connection after its handshake.

    `read` and `write` do as much as can be done at once, and raise `OSError` when the connection breaks and
    `Misbehaviour` when the peer sends what it must not. Behind a BYE or a HELLO nothing is read: what follows is for
    whoever has the connection next.
    """

    def __init__(self, connection: ssl.SSLSocket, traffic: Traffic, load: Load) -> None:
        self.connection, self.traffic, self.load = connection, traffic, load
        self.broken = ""  # why nothing crosses any more
        self.is_parked = False  # what has come is for a message that nobody has asked for yet
        self.is_resting = False  # nothing new is sent here
        self.has_ended, self.ended_at = False, 0.0  # a BYE or HELLO has come, and when
        self._header = bytearray(HEADER_BYTES)
        self._frame: Frame | None = None
        self._into = memoryview(self._header)  # what is still to be filled, of the header or the payload
        self._payload = memoryview(b"")
        self._outgoing: list[memoryview] = []
        self._writing: Frame | None = None

    def write(self) -> bool:
        """Send; returns whether there is more that the network does not take now."""
        budget = _TURN_BYTES
        while budget > 0:
            if not self._outgoing and not self._take_frame():
                return False
            try:
                sent = self.connection.send(self._outgoing[0])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True
            budget -= sent
            self._outgoing[0] = self._outgoing[0][sent:]
            if not self._outgoing[0]:
                self._outgoing.pop(0)
            if not self._outgoing and self._writing is not None:
                self.traffic.written(self._writing)
                self._writing = None
        return True

    def let_go(self) -> None:
        """Let go of the memory of what is on its way: the rest of a frame is sent all the same, and none is kept."""
        self._outgoing = [memoryview(bytes(part)) for part in self._outgoing]
        if self._frame is not None:
            self._into, self._payload = SCRATCH[: len(self._into)], memoryview(b"")

    def turn_to(self, traffic: Traffic) -> None:
        """Exchange frames with another one from the next frame on."""
        self.traffic, self.is_resting, self.is_parked = traffic, False, False

    @property
    def is_between_frames(self) -> bool:
        """Whether whoever has the connection next can begin to read and to write."""
        return self._frame is None and len(self._into) == HEADER_BYTES and not self._outgoing

    def write_last(self) -> None:
        """Send what is to be told before the end; nothing is encrypted after it."""
        if self.load == "small":
            self.write()
        self._outgoing = []
        self.connection.shutdown(socket.SHUT_WR)

    def read(self) -> bool:
        """Receive; returns whether there is more here that the network will not tell of."""
        budget = _TURN_BYTES
        while budget > 0:
            if not self._into and not self._go_on():
                return False
            if self.has_ended:
                return False
            if not self._into:  # an empty payload
                continue
            try:
                received = self.connection.recv_into(self._into)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if received == 0:
                raise ConnectionResetError("the connection was closed")
            budget -= received
            self._into = self._into[received:]
        return True

    def _take_frame(self) -> bool:
        taken = None if self.is_resting else self.traffic.next_frame(self.load)
        if taken is None:
            return False
        self._writing, payload = taken
        header = self._writing.pack()
        if len(payload) <= MAX_CONTROL_BYTES:
            self._outgoing = [memoryview(header + payload)]
        else:
            self._outgoing = [memoryview(header), payload]
        return True

    def _go_on(self) -> bool:
        """Turn from a header to its payload, or from a payload to the next header; False where the lane is parked."""
        if self._frame is None:
            frame = Frame.unpack(self._header)
            if frame.num_bytes > (CHUNK_BYTES if frame.kind == DATA else MAX_CONTROL_BYTES):
                raise Misbehaviour(f"it announced a frame of {frame.num_bytes} bytes")
            payload = self.traffic.place(frame)
            self.is_parked = payload is None
            if payload is None:
                return False  # the header is looked at again when the lane is read again
            self._frame, self._payload, self._into = frame, payload, payload
            if payload:
                return True
        frame, self._frame, self._into = self._frame, None, memoryview(self._header)
        self.traffic.read(frame, self._payload)
        if frame.kind in (BYE, HELLO):
            self.has_ended, self.ended_at = True, time.monotonic()
        return True


def prepare(connection: socket.socket) -> None:
    """Set the options of a TCP connection that becomes a lane.

    A worker sends now and then. Where the system allows it, a lane goes by BBR, which still knows the link's rate
    after a pause; cubic begins anew, ten segments in the first round trip (Linux: tcp_slow_start_after_idle).
    """
    connection.setblocking(False)
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
