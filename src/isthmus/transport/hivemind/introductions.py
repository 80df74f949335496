"""Peers of a swarm show one another a trusted key before they answer or ask anything else."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from hivemind.p2p import P2PDaemonError  # type: ignore[import-untyped]

from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.trust import Trust

PROTOCOL = "isthmus-introduction"
_SECONDS = 2.0  # for the other one to show its key
_MAX_BYTES = 1 << 10
_READ_ERRORS = (P2PDaemonError, OSError, EOFError, ValueError, TimeoutError)


class Introductions:
    """Which peers have shown a trusted key to this one.

    What is signed names both peer ids, which libp2p has proved, so nobody else can show it again. The initial peers
    need no key: `isthmus dht` may have none. Where no keys are set everybody is known.
    """

    def __init__(self, settings: NodeSettings, trust: Trust, own_peer_id: str) -> None:
        self._settings, self._trust, self._own = settings, trust, own_peer_id
        self._keys = dict[str, str]()  # fingerprints, by peer id
        self._coming = set[str]()  # peer ids

    def knows(self, peer_id: str) -> bool:
        """Return whether a peer may ask this one, and be asked."""
        if not self._settings.trusts(peer_id):
            return False
        is_one_of_us = self._trust.is_open or bool(self._trust.among([self._keys.get(peer_id, "")]))
        return is_one_of_us or self._settings.is_initial(peer_id)

    async def introduce(self, p2p: Any, peer_id: Any, again: bool = False) -> None:
        """Show this peer's key to another one, and see its key, unless that is done.

        Raises:
            P2PDaemonError: it is no initial peer, and shows no trusted key.
        """
        name = str(peer_id)
        if self._trust.is_open or (self._trust.among([self._keys.get(name, "")]) and not again):
            return
        try:
            async with asyncio.timeout(_SECONDS):
                _, reader, writer = await p2p.open_stream(peer_id, PROTOCOL)
                try:
                    writer.write(self._show(name))
                    self._note(name, await reader.readline())
                finally:
                    writer.close()
        except _READ_ERRORS as error:
            if not self._settings.is_initial(name):
                raise P2PDaemonError(f"{name} shows no trusted key: {error}") from error

    async def serve(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear who another peer is, and tell it who this one is."""
        name = str(info.peer_id)
        if self._settings.trusts(name) and name not in self._coming:
            self._coming.add(name)
            with suppress(*_READ_ERRORS):
                async with asyncio.timeout(_SECONDS):
                    self._note(name, await reader.readline())
                    writer.write(self._show(name))
                    await writer.drain()
            self._coming.discard(name)
        writer.close()

    def _show(self, other: str) -> bytes:
        return json.dumps(self._trust.sign(f"peer {self._own} to peer {other}", None)).encode() + b"\n"

    def _note(self, other: str, line: bytes) -> None:
        if len(line) > _MAX_BYTES:
            raise ValueError("it told too much")
        signed = json.loads(line)
        self._trust.read(f"peer {other} to peer {self._own}", signed)
        if not self._trust.is_open:
            self._keys[other] = signed["key"]
