"""An elastic engine without a server: workers find one another in hivemind's DHT and talk over libp2p."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
from contextlib import suppress

from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Membership, Rendezvous, check_grace
from isthmus.transport.hivemind import frames
from isthmus.transport.hivemind.connections import Libp2pPeers, PeerConnections
from isthmus.transport.hivemind.frames import Kind
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.matchmaking import Matchmaker
from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.hivemind.presence import Presence
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.peers import BufferPeers

_HELLO_SECONDS = 5.0  # for a stream to say what it is for, and for this worker to come to its rendezvous
_GOODBYE_SECONDS = 3.0
_MAX_UNCLAIMED = 256  # streams that have not said it yet


class HivemindMembership(Membership):
    """The workers of a libp2p swarm: encrypted, through NATs as far as libp2p gets, without any server of its own.

    A worker is known by its peer id, the hash of a key that stays in the run's folder: it is the same after a restart,
    and cannot be forged. The first worker, or `isthmus dht`, starts without initial peers.

    The sync budget is the bound on one collective; heartbeats follow from it. After `grace_seconds` a majority goes on
    without those who are alive but do not come. The first rank is the worker to the others, and finds them.
    """

    def __init__(
        self,
        name: str,
        run: str,
        settings: NodeSettings,
        sync_budget_seconds: float = 60.0,
        grace_seconds: float = 30.0,
        connect_seconds: float = 60.0,
        rank_in_worker: int = 0,
    ) -> None:
        check_grace(grace_seconds)
        self.settings = settings
        self.sync_budget_seconds, self.grace_seconds = sync_budget_seconds, grace_seconds
        self.name, self._connect_seconds = name, connect_seconds
        self._run = f"isthmus-{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}"
        self._protocol = f"{self._run}/{frames.PAYLOAD_BYTES}"
        self._node = Node(settings)
        self._presence = Presence(self._node, self._run, name)
        self._matchmaker = Matchmaker(self._node, self._presence, self._run, name)
        self._rank_in_worker = rank_in_worker
        self._rendezvous_id, self._matched = "", dict[str, str]()  # peer ids by name, at the first rank's last one
        self._peer_ids = dict[str, str]()  # by worker name, of the ranks that are this one's peers
        self._connections: PeerConnections | None = None
        self._announcing: asyncio.Future[None] | None = None
        self._changed = asyncio.Condition()
        self._num_unclaimed = 0  # streams that did not say what they are for, or came before this worker

    @property
    def peer_id(self) -> str:
        """The peer id of this worker, for the others' `allowed_peers`; empty until it has connected."""
        return self._node.peer_id

    @override
    def connect(self, link: LinkEnd) -> None:
        self._node.start(self._connect_seconds)
        atexit.register(self.leave)
        try:
            self._node.call(self._announce())
        except BaseException:
            self.leave()
            raise

    def addresses(self) -> list[str]:
        """Return the multiaddrs of this worker: initial peers for others."""
        return self._node.call(self._node.addresses())

    @property
    @override
    def contact(self) -> str:
        return self.peer_id

    @override
    def rendezvous(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        found, self._matched = self._node.call(self._match(info, wait_seconds))
        self._rendezvous_id = found.id
        return found

    @override
    def connect_peers(self, rendezvous: Rendezvous, names: list[str], weights: list[float]) -> BufferPeers:
        if self._rank_in_worker > 0:
            peer_ids = {name: self._contact_of(name, rendezvous.members[name]) for name in names}
        elif rendezvous.id == self._rendezvous_id:
            peer_ids = self._matched  # as they proved in the matchmaking
        else:
            raise TransportError("that rendezvous is over: come to another one")
        if len(names) > 1:
            self._node.call(self._connect(bytes.fromhex(rendezvous.id), names, peer_ids))
        return Libp2pPeers(self._connections, names.index(self.name), weights, self._node.call)

    def _contact_of(self, name: str, info: MemberInfo) -> str:
        """Return the peer id of the rank of a worker that is this one's peer."""
        contacts, rank = info.get("contacts"), self._rank_in_worker
        peer_id = contacts[rank] if isinstance(contacts, list) and rank < len(contacts) else None
        if not isinstance(peer_id, str):
            raise TransportError(
                f"{name} does not say where its rank {rank} is: install the same version of isthmus everywhere"
            )
        if not self.settings.admits(peer_id):
            raise TransportError(f"rank {rank} of {name}, peer {peer_id}, is not among allowed_peers: add it there")
        return peer_id

    @override
    def disconnect_peers(self) -> None:
        self._node.call(self._disconnect())

    @override
    def leave(self) -> None:
        atexit.unregister(self.leave)
        with suppress(TransportError, TimeoutError):
            self._node.call(self._withdraw())
        self._node.stop()

    async def _announce(self) -> None:
        is_first = self._rank_in_worker == 0
        if is_first:
            namesake = await self._presence.find_namesake()
            if namesake is not None:
                raise UserError(
                    f"another worker calls itself {self.name} (peer {namesake}): give each worker a name of its own"
                )
            await self._matchmaker.start()
        await self._node.handle(self._protocol, self._serve)
        if is_first:
            await self._presence.announce()
        self._announcing = asyncio.ensure_future(self._presence.keep_in_touch(announce=is_first))

    async def _match(self, info: MemberInfo, wait_seconds: float) -> tuple[Rendezvous, dict[str, str]]:
        await self._disconnect()
        self._presence.announce_soon()
        return await self._matchmaker.match(info, wait_seconds, self.grace_seconds)

    async def _connect(self, rendezvous: bytes, names: list[str], peer_ids: dict[str, str]) -> None:
        await self._disconnect()
        self._peer_ids = peer_ids
        self._connections = PeerConnections(rendezvous, names, names.index(self.name), self.sync_budget_seconds)
        self._connections.open(lambda rank: self._node.open_stream(peer_ids[names[rank]], self._protocol))
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a stream that another worker opened; it ends at once unless it is a peer's, for this sync."""
        if not self.settings.admits(peer_id) or self._num_unclaimed >= _MAX_UNCLAIMED:
            return
        self._num_unclaimed += 1
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                frame, _ = await frames.receive_any(reader, 0)
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self._connections and self._connections.rendezvous == frame.rendezvous
                    )
        except (TransportError, TimeoutError, OSError, EOFError):
            return
        finally:
            self._num_unclaimed -= 1
        connections = self._connections
        assert connections is not None
        name = connections.names[frame.sender] if frame.sender < len(connections.names) else ""
        if frame.kind in (Kind.OPEN_DATA, Kind.OPEN_CONTROL) and self._peer_ids.get(name) == peer_id:
            await connections.serve(frame, (reader, writer))

    async def _disconnect(self) -> None:
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def _withdraw(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            await self._disconnect()
            if self._rank_in_worker == 0:
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._presence.withdraw()
