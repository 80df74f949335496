"""A TCP connection between two workers that hold the same token: JSON messages, each with a MAC, and raw bytes.

Both ends prove that they hold the token without showing it: each sends a random challenge, and a keyed blake2b of
both challenges. The key of the messages' MACs is derived from the token and both challenges, and every message is
counted, so none can be forged, replayed or reordered. Raw bytes have no MAC: their hashes travel in a message. Nothing
is encrypted.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from isthmus.transport.base import TransportError

_HELLO = b"isthmus heal 1\n"
_PROOF_BYTES = 32


class Channel:
    """One end of a connection, made by `connect` or `accept`.

    `patience` returns the seconds that the next call on the connection may wait, and raises `TimeoutError` where none
    are left; `ours` and `theirs` name the ends, so that a message cannot be sent back to its sender.

    Every method raises `OSError` when the connection breaks, `TimeoutError` (one of them) when it makes no progress,
    and `TransportError` when the other end holds another token or does not keep to the rules.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, patience: Callable[[], float], ours: bytes, theirs: bytes
    ) -> None:
        self._connection, self._key, self.patience = connection, key, patience
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    @classmethod
    def connect(cls, connection: socket.socket, token: str, patience: Callable[[], float]) -> Channel:
        """Return the channel after the handshake of the end that connected."""
        challenge = _read(connection, len(_HELLO) + _PROOF_BYTES, patience)
        if not challenge.startswith(_HELLO):
            raise TransportError("it is no isthmus worker, or one of another version")
        challenges = challenge[len(_HELLO) :] + secrets.token_bytes(_PROOF_BYTES)
        _write(connection, [challenges[_PROOF_BYTES:] + _mac(token.encode(), b"joiner", challenges)], patience)
        if not compare_digest(_read(connection, _PROOF_BYTES, patience), _mac(token.encode(), b"donor", challenges)):
            raise TransportError("it holds another token")
        return cls(connection, _mac(token.encode(), b"key", challenges), patience, b"joiner", b"donor")

    @classmethod
    def accept(cls, connection: socket.socket, token: str, patience: Callable[[], float]) -> Channel:
        """Return the channel after the handshake of the end that listened."""
        own = secrets.token_bytes(_PROOF_BYTES)
        _write(connection, [_HELLO + own], patience)
        reply = _read(connection, 2 * _PROOF_BYTES, patience)
        challenges = own + reply[:_PROOF_BYTES]
        if not compare_digest(reply[_PROOF_BYTES:], _mac(token.encode(), b"joiner", challenges)):
            _write(connection, [bytes(_PROOF_BYTES)], patience)  # so that it knows why
            raise TransportError("the joiner holds another token")
        _write(connection, [_mac(token.encode(), b"donor", challenges)], patience)
        return cls(connection, _mac(token.encode(), b"key", challenges), patience, b"donor", b"joiner")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of plain values."""
        self.send_text(json.dumps(message).encode())

    def send_text(self, text: bytes) -> None:
        """Send a message that is JSON already."""
        mac = self._sign(self._ours, self._sent, text)
        self._sent += 1
        _write(self._connection, [len(text).to_bytes(4, "big") + mac, text], self.patience)

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
        header = _read(self._connection, 4 + _PROOF_BYTES, self.patience)
        size = int.from_bytes(header[:4], "big")
        if size > max_bytes:
            raise TransportError(f"it sent a message of {size} bytes where {max_bytes} are allowed")
        text = _read(self._connection, size, self.patience)
        if not compare_digest(header[4:], self._sign(self._theirs, self._received, text)):
            raise TransportError("it sent a message with a wrong checksum")
        self._received += 1
        return text

    def send_raw(self, views: Iterable[memoryview]) -> None:
        """Send bytes as they are."""
        _write(self._connection, views, self.patience)

    def receive_raw(self, into: memoryview) -> None:
        """Fill `into` with bytes as they come."""
        _read_into(self._connection, into, self.patience)

    def _sign(self, end: bytes, number: int, text: bytes) -> bytes:
        return _mac(self._key, end, number.to_bytes(8, "big") + text)


def shut_down(connection: socket.socket) -> None:
    """End a connection on which another thread may be waiting: that thread gets an `OSError`."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _mac(key: bytes, purpose: bytes, text: bytes) -> bytes:
    short_key = blake2b(key, digest_size=32).digest()  # keys of blake2b take at most 64 bytes
    return blake2b(text, key=short_key, person=purpose, digest_size=_PROOF_BYTES).digest()


def _write(connection: socket.socket, views: Iterable[bytes | memoryview], patience: Callable[[], float]) -> None:
    """Send everything; patience is for each piece of progress, not for the whole (as in `sendall`)."""
    for view in views:
        rest = memoryview(view)
        while rest:
            connection.settimeout(patience())
            rest = rest[connection.send(rest) :]


def _read(connection: socket.socket, size: int, patience: Callable[[], float]) -> bytes:
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer), patience)
    return bytes(buffer)


def _read_into(connection: socket.socket, view: memoryview, patience: Callable[[], float]) -> None:
    while view:
        connection.settimeout(patience())
        received = connection.recv_into(view)
        if received == 0:
            raise ConnectionResetError("the connection broke")
        view = view[received:]
