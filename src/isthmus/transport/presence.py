"""Who is alive: every worker keeps a short-lived record in the DHT, and answers when it is called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from hivemind.utils import get_dht_time  # type: ignore[import-untyped]

from isthmus.transport.libp2p import Node

_LIFETIME_SECONDS = 10.0  # of a record; workers' clocks may differ by 3 s
_ANNOUNCE_SECONDS = 2.5
_WITHDRAW_SECONDS = 0.1  # the record that expires last counts: this one, until the worker comes back
_NAME_BYTES = 200


@dataclass(frozen=True)
class Record:
    """What a worker says in the DHT."""

    name: str
    expires: float  # DHT time; renewed again and again


class Presence:
    """This worker's record, and a look at the others'.

    Args:
        node: a connected node.
        run: key of the records: workers of other runs do not show.
        name: this worker.
    """

    def __init__(self, node: Node, run: str, name: str) -> None:
        self._node, self._key, self._name = node, f"{run}-presence", name
        self._expires = 0.0
        self._silent = dict[str, Record]()  # did not answer; not asked again until they announce themselves again

    async def keep(self) -> None:
        """Announce for ever."""
        while True:
            await self.announce()
            await asyncio.sleep(_ANNOUNCE_SECONDS)
            await self._node.remember_initial_peers()

    async def announce(self) -> None:
        """This worker is here."""
        await self._store(self._name, get_dht_time() + _LIFETIME_SECONDS)

    async def withdraw(self) -> None:
        """This worker goes."""
        await self._store("", self._expires + _WITHDRAW_SECONDS)

    async def present(self) -> dict[str, Record]:
        """Records by peer id, of all whose record has not run out; this worker's among them."""
        found = await self._node.dht.get(self._key, latest=True)
        records = {self._node.peer_id: Record(self._name, get_dht_time() + _LIFETIME_SECONDS)}
        for peer_id, entry in found.value.items() if found and isinstance(found.value, dict) else ():
            valid = isinstance(peer_id, str) and isinstance(entry.value, str) and len(entry.value) <= _NAME_BYTES
            if valid and entry.value and peer_id != self._node.peer_id and self._node.settings.admits(peer_id):
                records[peer_id] = Record(entry.value, entry.expiration_time)
        return records

    async def silent(self, records: dict[str, Record], peer_ids: Iterable[str]) -> set[str]:
        """Those of `peer_ids` that do not answer."""
        asked = [peer_id for peer_id in peer_ids if self._silent.get(peer_id) != records[peer_id]]
        answers = await asyncio.gather(*map(self._node.answers, asked))
        self._silent |= {
            peer_id: records[peer_id] for peer_id, answer in zip(asked, answers, strict=True) if not answer
        }
        return {peer_id for peer_id in peer_ids if self._silent.get(peer_id) == records[peer_id]}

    async def _store(self, name: str, expires: float) -> None:
        self._expires = expires
        await self._node.dht.store(self._key, name, expires, subkey=self._node.peer_id)
