"""Buffers on a stream, in frames that are checked before they are believed.

Whoever reads gets a `TransportError` about what is no frame, damaged, or not due, and `EOFError` where the stream ends.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from dataclasses import dataclass, fields, replace
from enum import IntEnum

from isthmus.transport.base import TransportError

Buffer = bytes | bytearray | memoryview
PAYLOAD_BYTES = 1 << 20  # of one frame, at most
TEXT_BYTES = 400  # of a frame that says why a worker aborts, at most
_MAGIC = b"isf1"
_HEADER = struct.Struct(">4s20sBHIIII")  # magic, rendezvous, kind, sender, collective, number, length, checksum


class Kind(IntEnum):
    """The purpose of a frame."""

    OPEN_DATA = 1  # opens a stream for payloads
    OPEN_CONTROL = 2  # opens a stream for the three below
    HEARTBEAT = 3  # the sender is alive
    GOODBYE = 4  # the sender has all it needs and leaves
    ABORT = 5  # the sender cannot go on; the payload says why
    DATA = 6  # a piece of a collective's payload


@dataclass(frozen=True)
class Frame:
    """The header of a frame."""

    kind: Kind
    rendezvous: bytes  # 20 bytes
    sender: int  # rank
    collective: int = 0
    number: int = 0  # within the collective
    length: int = 0  # bytes of its payload

    def header(self, payload: Buffer = b"") -> bytes:
        """Return the bytes that go before the payload."""
        return self._pack(self.checksum(payload))

    def checksum(self, payload: Buffer) -> int:
        """Return the CRC-32 of header and payload."""
        return zlib.crc32(payload, zlib.crc32(self._pack(0)))

    @classmethod
    def parse(cls, header: bytes) -> tuple[Frame, int]:
        """Read what `header` made; return the frame and its checksum."""
        magic, rendezvous, kind, *numbers, checksum = _HEADER.unpack(header)
        if magic != _MAGIC or kind not in tuple(Kind):
            raise TransportError("sent something that is no frame")
        return cls(Kind(kind), rendezvous, *numbers), checksum

    def _pack(self, checksum: int) -> bytes:
        return _HEADER.pack(
            _MAGIC, self.rendezvous, self.kind, self.sender, self.collective, self.number, self.length, checksum
        )


async def send(writer: asyncio.StreamWriter, frame: Frame, payload: memoryview) -> None:
    """Send a payload of any size as frames like `frame`, numbered from 0."""
    for number, start in enumerate(range(0, len(payload), PAYLOAD_BYTES)):
        piece = payload[start : start + PAYLOAD_BYTES]
        writer.write(replace(frame, number=number, length=len(piece)).header(piece))
        writer.write(piece)
        await writer.drain()


async def receive(reader: asyncio.StreamReader, frame: Frame, into: memoryview) -> None:
    """Fill `into` from frames like `frame`, numbered from 0, and refuse any other; nothing is allocated."""
    for number, start in enumerate(range(0, len(into), PAYLOAD_BYTES)):
        piece = into[start : start + PAYLOAD_BYTES]
        due = replace(frame, number=number, length=len(piece))
        came, checksum = Frame.parse(await reader.readexactly(_HEADER.size))
        if came != due:
            raise TransportError(f"sent a frame that is not due: {_difference(came, due)}")
        await _read_into(reader, piece)
        if checksum != due.checksum(piece):
            raise TransportError("sent a damaged frame")


async def receive_any(reader: asyncio.StreamReader, max_bytes: int) -> tuple[Frame, bytes]:
    """Return the next frame, of any kind, with a payload of at most `max_bytes`."""
    frame, checksum = Frame.parse(await reader.readexactly(_HEADER.size))
    if frame.length > max_bytes:
        raise TransportError(f"sent a frame of {frame.length} bytes where {max_bytes} are allowed")
    payload = await reader.readexactly(frame.length)
    if checksum != frame.checksum(payload):
        raise TransportError("sent a damaged frame")
    return frame, payload


async def _read_into(reader: asyncio.StreamReader, view: memoryview) -> None:
    while view:
        data = await reader.read(len(view))
        if not data:
            raise EOFError("the stream ended")
        view[: len(data)] = data
        view = view[len(data) :]


def _difference(came: Frame, due: Frame) -> str:
    names = [field.name for field in fields(Frame) if getattr(came, field.name) != getattr(due, field.name)]
    return ", ".join(f"{name} {_show(getattr(came, name))} for {_show(getattr(due, name))}" for name in names)


def _show(value: bytes | int) -> str:
    return value.hex()[:8] if isinstance(value, bytes) else str(int(value))
