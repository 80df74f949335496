"""What the workers of a run write into the DHT, each a record of its own under the same key."""

from __future__ import annotations

import logging
from typing import NamedTuple

from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.node_settings import is_peer_id

_MAX_NAMED = 32  # strangers in the log
_LOGGER = logging.getLogger(__name__)


class Record(NamedTuple):
    """What one worker has under a key of the DHT."""

    value: str | bool
    expires: float  # DHT time


class WorkerRecords:
    """The records of the workers that are trusted; what others write is ignored, and named in the log once."""

    def __init__(self, node: Node, name: str) -> None:
        self._node, self._name = node, name
        self._ignored: set[str] = set()

    async def store(self, key: str, value: str | bool, expires: float) -> bool:
        """Write this worker's record under a key; one that expires earlier than the one before is refused."""
        subkey = f"{self._node.trust.identity.fingerprint} {self._node.peer_id}"
        return bool(await self._node.dht.store(key, value, expires, subkey=subkey))

    async def read(self, key: str) -> dict[str, Record]:
        """Return all workers' records under a key, by peer id."""
        found = await self._node.dht.get(key, latest=True)
        records = dict[str, Record]()
        for subkey, entry in found.value.items() if found and isinstance(found.value, dict) else ():
            try:
                peer_id = self._peer_of(subkey)
            except ValueError as error:
                self._ignore(str(error))
                continue
            if peer_id not in records or records[peer_id].expires < entry.expiration_time:
                records[peer_id] = Record(entry.value, entry.expiration_time)
        return records

    def _peer_of(self, subkey: str) -> str:
        fingerprint, peer_id = subkey.split()
        if not self._node.trust.among([fingerprint]):
            raise ValueError(f"its key {fingerprint} is not trusted")
        if not is_peer_id(peer_id):
            raise ValueError(f"{peer_id!r} is no peer id")
        if not self._node.settings.admits(peer_id):
            raise ValueError(f"peer {peer_id} is not among allowed_peers")
        return peer_id

    def _ignore(self, why: str) -> None:
        if why not in self._ignored and len(self._ignored) < _MAX_NAMED:
            self._ignored.add(why)
            _LOGGER.warning("%s ignores a record in the DHT: %s", self._name, why)
