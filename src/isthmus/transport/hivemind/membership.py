"""An elastic engine without a server: workers find one another in hivemind's DHT."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Membership, Rendezvous, check_grace
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.matchmaking import Matchmaker
from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.hivemind.presence import LIFETIME_SECONDS, Presence
from isthmus.transport.hivemind.worker_records import WorkerRecords
from isthmus.transport.link_end import LinkEnd

_GOODBYE_SECONDS = 3.0


class HivemindMembership(Membership):
    """The workers of a libp2p swarm, without any server of its own.

    A worker is known by its peer id, the hash of a key that stays in the run's folder: it is the same after a restart,
    and cannot be forged. The first worker, or `isthmus dht`, starts without initial peers. What a worker writes into
    the DHT and tells the others is signed, and who is not trusted does not count.

    After `grace_seconds` a majority goes on without those who are alive but do not come.
    """

    forgets_seconds = LIFETIME_SECONDS

    def __init__(
        self,
        name: str,
        run: str,
        settings: NodeSettings,
        grace_seconds: float = 30.0,
        connect_seconds: float = 60.0,
    ) -> None:
        check_grace(grace_seconds)
        self.settings, self.grace_seconds = settings, grace_seconds
        self.name, self._connect_seconds = name, connect_seconds
        run = f"isthmus-{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}"
        self._node = Node(settings)
        records = WorkerRecords(self._node, name)
        self._presence = Presence(self._node, records, run, name)
        self._matchmaker = Matchmaker(self._node, records, self._presence, run, name)
        self._announcing: asyncio.Future[Any] | None = None

    @property
    def peer_id(self) -> str:
        """The peer id of this worker, for the others' `allowed_peers`; empty until it has connected."""
        return self._node.peer_id

    @override
    def connect(self, link: LinkEnd) -> None:
        self._node.start(link.trust, self._connect_seconds)
        try:
            self._node.call(self._announce())
        except BaseException:
            self.leave()
            raise

    def addresses(self) -> list[str]:
        """Return the multiaddrs of this worker: initial peers for others."""
        return self._node.call(self._node.addresses())

    @override
    def rendezvous(
        self, info: MemberInfo, wait_seconds: float, gives_up: Callable[[], bool] = lambda: False
    ) -> Rendezvous:
        return self._node.call(self._match(info, wait_seconds), gives_up)

    @override
    def rest(self) -> None:
        self._node.call(self._rest())

    @override
    def leave(self) -> None:
        with suppress(TransportError, TimeoutError):
            self._node.call(self._withdraw())
        self._node.stop()

    async def _announce(self) -> None:
        namesake = await self._presence.find_namesake()
        if namesake is not None:
            raise UserError(
                f"another worker calls itself {self.name} (peer {namesake}): give each worker a name of its own"
            )
        await self._matchmaker.start()
        await self._presence.announce()
        self._announcing = asyncio.gather(self._presence.keep_announcing(), self._presence.keep_in_touch())

    async def _match(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        self._presence.announce_soon()
        return await self._matchmaker.match(info, wait_seconds, self.grace_seconds)

    async def _rest(self) -> None:
        self._presence.rest_soon()

    async def _withdraw(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._presence.withdraw()
