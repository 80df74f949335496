"""The workers that are alive: each keeps a short-lived record in the DHT, and answers when it is called."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from hivemind.utils import get_dht_time  # type: ignore[import-untyped]

from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.worker_records import WorkerRecords

LIFETIME_SECONDS = 10.0  # of a record; workers' clocks may differ by 3 s
_ANNOUNCE_SECONDS = 2.5
_WITHDRAW_SECONDS = 0.1  # the record that expires last counts: this one, until the worker comes back


@dataclass(frozen=True)
class PresenceRecord:
    """The record of one worker in the DHT."""

    name: str
    expires: float  # DHT time; renewed again and again


class Presence:
    """Keeps this worker's record in the DHT, and reads the others'; workers of other runs do not show."""

    def __init__(self, node: Node, records: WorkerRecords, run: str, name: str) -> None:
        self._node, self._records, self._key, self._name = node, records, f"{run}-presence", name
        self._announce_now = asyncio.Event()
        self._expires = 0.0
        self._rests = False
        self.reachable: set[str] = set()  # peer ids of the others that answered at the last look
        self._silent = dict[str, PresenceRecord]()  # did not answer; not asked before a new announcement

    async def keep_announcing(self) -> None:
        """Announce this worker, unless it rests, for ever; nothing else may hold that up."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._announce_now.wait(), _ANNOUNCE_SECONDS)
            self._announce_now.clear()
            await (self.withdraw() if self._rests else self.announce())

    async def keep_in_touch(self) -> None:
        """Speak to the initial peers, for ever."""
        while True:
            await asyncio.sleep(_ANNOUNCE_SECONDS)
            await self._node.remember_initial_peers()

    def announce_soon(self) -> None:
        """Announce now: this worker may have been away, and the others may have given it up."""
        self._rests = False
        self._announce_now.set()

    def rest_soon(self) -> None:
        """Have the others not wait for this worker until it announces itself again."""
        self._rests = True
        self._announce_now.set()

    async def announce(self) -> None:
        """Tell the others that this worker is alive."""
        await self._store(self._name, max(get_dht_time() + LIFETIME_SECONDS, self._expires + _WITHDRAW_SECONDS))

    async def withdraw(self) -> None:
        """Tell the others not to wait for this worker."""
        await self._store("", self._expires + _WITHDRAW_SECONDS)

    async def find_alive(self, here: set[str]) -> tuple[dict[str, PresenceRecord], set[str]]:
        """Return the records of all that seem alive, by peer id, this worker's too; and who of them does not answer.

        Those who are `here` (peer ids) need not be asked.
        """
        others = await self._others()
        records = {peer_id: record for peer_id, record in others.items() if record.name != self._name}
        silent = await self._find_silent({peer_id: records[peer_id] for peer_id in records.keys() - here})
        self.reachable = records.keys() - silent
        return {self._node.peer_id: PresenceRecord(self._name, self._expires)} | records, silent

    async def find_namesake(self) -> str | None:
        """Return the peer id of a living worker that goes by the same name."""
        namesakes = {peer_id: record for peer_id, record in (await self._others()).items() if record.name == self._name}
        return next(iter(namesakes.keys() - await self._find_silent(namesakes)), None)

    async def _find_silent(self, records: dict[str, PresenceRecord]) -> set[str]:
        asked = [peer_id for peer_id, record in records.items() if self._silent.get(peer_id) != record]
        answers = await asyncio.gather(*map(self._node.ping, asked))
        self._silent |= {peer_id: records[peer_id] for peer_id, alive in zip(asked, answers, strict=True) if not alive}
        return {peer_id for peer_id, record in records.items() if self._silent.get(peer_id) == record}

    async def _others(self) -> dict[str, PresenceRecord]:
        records = await self._records.read(self._key)
        return {
            peer_id: PresenceRecord(str(record.value), record.expires)
            for peer_id, record in records.items()
            if record.value and peer_id != self._node.peer_id
        }

    async def _store(self, name: str, expires: float) -> None:
        self._expires = expires
        await self._records.store(self._key, name, expires)
