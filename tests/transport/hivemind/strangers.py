"""A libp2p peer with hivemind's own DHT node, who holds no key of the run, and may write and ask what it likes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from hivemind.dht.node import DHTID, DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from isthmus.transport.hivemind.introductions import PROTOCOL


class Stranger:
    """Runs on an event loop of its own; `call` waits for a coroutine there.

    Args:
        initial_peers: whom it connects with.
        options: of the DHT node.
    """

    def __init__(self, initial_peers: list[str], **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self._start(initial_peers, options))
        self.peer_id = str(self.p2p.peer_id)
        validator = options.get("record_validator")
        self.fingerprint = validator._identity.fingerprint if validator else ""

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def store(self, key: str, subkey: Any, value: Any, seconds: float = 60.0) -> None:
        """Write a record wherever that is possible, and hand it to all whom it knows."""
        self.call(self.dht.store(key, value, get_dht_time() + seconds, subkey=subkey))

    def look(self, peer_id: str, key: str) -> dict[str, tuple[bytes, float]]:
        """Return the records that another peer has under a key, as they are stored, and when each expires."""
        key_id = DHTID.generate(key)
        found = self.call(self.dht.protocol.call_find(PeerID.from_base58(peer_id), [key_id]))
        entry = found[key_id][0] if found else None
        return {} if entry is None else dict(entry.value.items())

    def copy(self, peer_id: str, key: str, subkey: str, value: bytes, expires: float) -> list[bool]:
        """Hand a record as it is stored to another peer; return whether it took it."""
        stored = self.dht.protocol.call_store(
            PeerID.from_base58(peer_id), [DHTID.generate(key)], [value], [expires], [subkey]
        )
        return self.call(stored)

    def hang(self) -> None:
        """Stay silent from now on whoever asks for records, for a key or for a group."""
        self.call(self._hang())

    def forget(self) -> None:
        """Take whatever record others want kept, and keep none."""
        for storage in (self.dht.protocol.storage, self.dht.protocol.cache):
            storage.store = storage.store_subkey = lambda *record, **options: True

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, initial_peers: list[str], options: dict[str, Any]) -> None:
        self.p2p = await P2P.create(
            initial_peers=[Multiaddr(each) for each in initial_peers], host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
        self.dht = await DHTNode.create(
            p2p=self.p2p,
            initial_peers=[Multiaddr(each) for each in initial_peers],
            ensure_bootstrap_success=False,
            strict=False,
            wait_timeout=2,
            **options,
        )

    async def _hang(self) -> None:
        async def answer_nothing(*request: Any) -> None:
            await asyncio.sleep(600)

        await self.p2p._client.remove_unary_handler("DHTProtocol.rpc_find")
        await self.p2p._client.add_unary_handler("DHTProtocol.rpc_find", answer_nothing)
        await self.p2p.add_binary_stream_handler(PROTOCOL, answer_nothing)

    async def _stop(self) -> None:
        await self.dht.shutdown()
        await self.p2p.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
