"""Where a link has registered, so that those who cannot reach it have it come to them, and where it asks for others."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from isthmus.link.control import Control
from isthmus.link.greeting import keep_alive
from isthmus.link.group import Member
from isthmus.link.relay import ANSWER, CALL, SPLICED, TOKEN_BYTES

_LOGGER = logging.getLogger(__name__)
_ANSWER_SECONDS = 5.0  # to connect where this link is told to come, or may come
_MAX_ANSWERING = 64  # connections on which this link is on its way
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 30.0  # before trying again to register


class Registrations:
    """The links at which this one keeps a connection open.

    Args:
        own_id: of this link.
        connect: opens the connection to another link's relay.
        admit: treats a connection that this link has opened as if somebody else had: it waits to be greeted.
        beat_seconds, patience_seconds: see `Control`.
    """

    def __init__(
        self,
        own_id: str,
        connect: Callable[[Member], ssl.SSLSocket],
        admit: Callable[[socket.socket, str], None],
        beat_seconds: float,
        patience_seconds: float,
    ) -> None:
        self._own_id, self._connect, self._admit = own_id, connect, admit
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._changed = threading.Condition()
        self._kept: dict[Member, threading.Event] = {}  # and what ends its thread
        self._live: dict[Member, Control] = {}
        self._answers: dict[bytes, bool | None] = {}  # by token: whether the other one was sent for
        self._answering = threading.Semaphore(_MAX_ANSWERING)
        self._closed = False

    def add(self, relays: Iterable[Member]) -> None:
        """Keep a connection open at these links, too: it is made again whenever it ends."""
        with self._changed:
            for relay in relays:
                if relay not in self._kept and not self._closed:
                    self._kept[relay] = ended = threading.Event()
                    threading.Thread(
                        target=self._keep, args=[relay, ended], name="isthmus-registered", daemon=True
                    ).start()

    def drop_all_but(self, relays: Iterable[Member]) -> None:
        """End the connections with all links but these."""
        with self._changed:
            for relay in self._kept.keys() - set(relays):
                self._end(relay)

    def call(self, member: Member, deadline: float) -> tuple[socket.socket, float] | None:
        """Return a connection with a link that has registered where this one has, and the seconds that it took.

        It is None where nobody there knows it.
        """
        with self._changed:
            live = sorted(self._live.items(), key=lambda entry: entry[0].address != member.via)
        for relay, control in live:
            begin, token = time.monotonic(), secrets.token_bytes(TOKEN_BYTES)
            with suppress(OSError):
                if self._ask(control, member.id, token, deadline):
                    connection = _connect_raw(relay.address, CALL + token)
                    if connection.recv(len(SPLICED)) == SPLICED:
                        return connection, time.monotonic() - begin
                    connection.close()
        return None

    def close(self) -> None:
        """End all connections. A second call does nothing."""
        with self._changed:
            self._closed = True
            for relay in list(self._kept):
                self._end(relay)
            self._changed.notify_all()

    def _end(self, relay: Member) -> None:
        self._kept.pop(relay).set()
        if relay in self._live:
            self._live[relay].end()

    def _ask(self, control: Control, wanted: str, token: bytes, deadline: float) -> bool:
        """Return whether a relay has sent for a link."""
        with self._changed:
            self._answers[token] = None
        try:
            control.tell(want=wanted, token=token.hex())
            with self._changed:
                left = min(_ANSWER_SECONDS, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._answers[token] is not None or self._closed, left)
                return bool(self._answers[token])
        finally:
            with self._changed:
                del self._answers[token]

    def _keep(self, relay: Member, ended: threading.Event) -> None:
        """Register, again and again, until that is not wanted any more."""
        pause_seconds, is_named = 0.0, False
        while not ended.wait(pause_seconds):
            pause_seconds = min(_LONGEST_PAUSE_SECONDS, max(_FIRST_PAUSE_SECONDS, 2 * pause_seconds))
            try:
                with self._connect(relay) as connection:
                    pause_seconds, is_named = _FIRST_PAUSE_SECONDS, False
                    self._stay(relay, Control(connection, self._beat_seconds, self._patience_seconds), ended)
            except (OSError, ValueError) as error:
                if relay.name and not is_named and not ended.is_set():
                    _LOGGER.warning("%s cannot be used now, and is tried again: %s", relay.name, error)
                is_named = True

    def _stay(self, relay: Member, control: Control, ended: threading.Event) -> None:
        """Be registered for as long as the connection lives."""
        control.tell(id=self._own_id)
        with self._changed:
            if ended.is_set():
                return
            self._live[relay] = control
            self._changed.notify_all()
        try:
            for message in control.messages():
                self._hear(relay, message)
        finally:
            with self._changed:
                if self._live.get(relay) is control:
                    del self._live[relay]

    def _hear(self, relay: Member, message: dict[str, Any]) -> None:
        match message:
            case {"come": str(token)} if self._answering.acquire(blocking=False):
                threading.Thread(
                    target=self._answer, args=[relay, bytes.fromhex(token)], name="isthmus-answer", daemon=True
                ).start()
            case {"token": str(token), "granted": bool(granted)}:
                with self._changed:
                    if bytes.fromhex(token) in self._answers:
                        self._answers[bytes.fromhex(token)] = granted
                        self._changed.notify_all()

    def _answer(self, relay: Member, token: bytes) -> None:
        """Connect where this link was told to come, and wait there to be greeted."""
        try:
            with suppress(OSError):
                self._admit(_connect_raw(relay.address, ANSWER + token), relay.address[0])
        finally:
            self._answering.release()


def _connect_raw(address: tuple[str, int], preface: bytes) -> socket.socket:
    connection = socket.create_connection(address, _ANSWER_SECONDS)
    try:
        keep_alive(connection)
        connection.sendall(preface)
    except BaseException:
        connection.close()
        raise
    return connection
