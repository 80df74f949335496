"""How a link that cannot be reached is reached all the same: it has registered here, and is told to come.

Both who want to meet then have a connection to this link, which begins with a preface: a letter, and a token that only
those two were told. A link that wants the other one for itself takes its connection; between two others it passes on
the bytes. TLS runs from end to end inside, so it reads none of them.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.link.control import Control
from isthmus.link.splice import Splices

CALL, ANSWER = b"C", b"A"  # letters of a preface: of who wants the other, and of who was told to come; TLS has 0x16
TOKEN_BYTES = 16
SPLICED = b"\n"  # told to who called
_PENDING_SECONDS = 10.0  # for both to connect
_MAX_PENDING = 256  # at which somebody is awaited
_MAX_REGISTERED = 1024


@dataclass
class _Pending:
    """Two connections that are to be joined, or one that this link wants for itself."""

    ends_at: float
    is_own: bool
    here: dict[bytes, socket.socket] = field(default_factory=dict)  # by letter


class Relay:
    """Those who have registered at this link, and the connections that are passed on between them.

    Args:
        beat_seconds, patience_seconds: of a registration; see `Control`.
    """

    def __init__(self, beat_seconds: float, patience_seconds: float) -> None:
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._changed = threading.Condition()
        self._controls: set[Control] = set()
        self._registered: dict[str, Control] = {}  # by the id of the link
        self._pending: dict[bytes, _Pending] = {}  # by token
        self._splices = Splices()
        self._closed = False

    def serve(self, connection: ssl.SSLSocket) -> None:
        """Look after a link that registers, for as long as it lives."""
        control = Control(connection, self._beat_seconds, self._patience_seconds)
        with self._changed:
            if self._closed or len(self._controls) >= _MAX_REGISTERED:
                connection.close()
                return
            self._controls.add(control)
        with connection, suppress(OSError, ValueError):  # it is gone, or does not keep to the rules
            for message in control.messages():
                match message:
                    case {"id": str(link_id)}:
                        self._register(link_id, control)
                    case {"want": str(wanted), "token": str(token)}:
                        control.tell(token=token, granted=self._send_for(wanted, bytes.fromhex(token)))
        with self._changed:
            self._controls.discard(control)
            self._registered = {link_id: each for link_id, each in self._registered.items() if each is not control}
            self._changed.notify_all()

    def wait_for(self, link_id: str, seconds: float) -> None:
        """Wait until a link has registered here, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: link_id in self._registered or self._closed, seconds)

    def call_back(self, link_id: str, seconds: float) -> socket.socket | None:
        """Return a connection that a link has opened because it was told to; None where it is not here, or too slow."""
        token = secrets.token_bytes(TOKEN_BYTES)
        if not self._send_for(link_id, token, is_own=True):
            return None
        with self._changed:
            self._changed.wait_for(lambda: token not in self._pending or self._pending[token].here, seconds)
            pending = self._pending.pop(token, None)
            return pending.here.get(ANSWER) if pending is not None else None

    def arrive(self, preface: bytes, connection: socket.socket) -> None:
        """Join a connection with the other one of the same token, for which it waits a while; otherwise close it."""
        letter, token = preface[:1], preface[1:]
        with self._changed:
            pending = self._pending.get(token)
            if pending is None or letter in pending.here or (pending.is_own and letter != ANSWER):
                connection.close()
                return
            pending.here[letter] = connection
            self._changed.notify_all()
            if pending.is_own:
                return
            if len(pending.here) == 1:
                left = pending.ends_at - time.monotonic()
                if not self._changed.wait_for(lambda: self._pending.get(token) is not pending, left):
                    del self._pending[token]
                    connection.close()
                return
            del self._pending[token]
            self._changed.notify_all()
        try:
            pending.here[CALL].settimeout(_PENDING_SECONDS)
            pending.here[CALL].sendall(SPLICED)
            self._splices.join(pending.here[CALL], pending.here[ANSWER])
        except (OSError, KeyError):
            for each in pending.here.values():
                each.close()

    def close(self, seconds: float) -> None:
        """End all registrations, and, after so many seconds at most, all connections that are passed on.

        A second call does nothing.
        """
        with self._changed:
            self._closed = True
            for control in self._controls:
                control.end()
            for pending in self._pending.values():
                for connection in pending.here.values():
                    connection.close()
            self._pending.clear()
            self._changed.notify_all()
        self._splices.close(seconds)

    def _register(self, link_id: str, control: Control) -> None:
        with self._changed:
            self._registered[link_id] = control
            self._changed.notify_all()

    def _send_for(self, link_id: str, token: bytes, is_own: bool = False) -> bool:
        """Tell a link to come, so that a connection with the same token can be joined with its; False where it cannot.

        What nobody came for is forgotten here.
        """
        now = time.monotonic()
        with self._changed:
            for old in [each for each, pending in self._pending.items() if pending.ends_at < now]:
                if not self._pending[old].here:
                    del self._pending[old]
            control = self._registered.get(link_id)
            is_full = len(self._pending) >= _MAX_PENDING or (self._splices.is_full and not is_own)
            if control is None or self._closed or is_full or token in self._pending or len(token) != TOKEN_BYTES:
                return False
            self._pending[token] = _Pending(now + _PENDING_SECONDS, is_own)
        try:
            control.tell(come=token.hex())
        except OSError:
            control.end()
            return False
        return True
