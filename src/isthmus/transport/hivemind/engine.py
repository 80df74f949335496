"""An elastic world without a master: peers find one another in hivemind's DHT and talk over libp2p."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isthmus.core.types import UserError
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.membership import Card, Meeting, check_grace
from isthmus.transport.hivemind import frames
from isthmus.transport.hivemind.frames import Kind
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.matchmaking import Group, Matchmaker
from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.hivemind.presence import Presence
from isthmus.transport.hivemind.streams import Mesh, StreamPeers
from isthmus.transport.peers import BufferPeers

_HELLO_SECONDS = 5.0  # for a stream to say what it is for, and for this worker to come to the meeting it belongs to
_GOODBYE_SECONDS = 3.0
_MAX_WAITING = 256  # streams that have not said it yet


class Hivemind:
    """`Membership` over libp2p: encrypted, through NATs as far as libp2p gets, without any server of its own.

    A worker is known by its peer id, the hash of a key that stays in the run's folder: it is the same after a restart,
    and cannot be forged. The first worker, or `isthmus dht`, starts without initial peers.

    Args:
        name: this worker's, unique in the run.
        run: which run; others may use the same swarm.
        identity: file of this worker's key; made where there is none.
        initial_peers: multiaddrs of some peers, as `isthmus dht` prints them; one that answers is enough.
        allowed_peers: peer ids that may take part; None: whoever knows an address and the run.
        listen: multiaddrs to listen on.
        announce: multiaddrs under which the others can reach this worker, where it cannot find out by itself.
        relay: behind a NAT or a firewall: be reached through the other peers.
        sync_budget_seconds: bound on one collective; heartbeats follow from it.
        grace_seconds: after it, a majority meets without those who are alive but do not come.
        connect_seconds: how long to look for the initial peers.
        place: of this rank in its worker: the first one is the worker to the others, and meets them.

    Raises:
        UserError: `grace_seconds` is no time.
    """

    def __init__(
        self,
        name: str,
        run: str,
        identity: str | Path,
        initial_peers: Sequence[str] = (),
        allowed_peers: Sequence[str] | None = None,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        relay: bool = False,
        sync_budget_seconds: float = 60.0,
        grace_seconds: float = 30.0,
        connect_seconds: float = 60.0,
        place: int = 0,
    ) -> None:
        check_grace(grace_seconds)
        allowed = None if allowed_peers is None else frozenset(allowed_peers)
        self.settings = NodeSettings(
            Path(identity), tuple(initial_peers), tuple(listen), tuple(announce), allowed, relay
        )
        self.sync_budget_seconds, self.grace_seconds = sync_budget_seconds, grace_seconds
        self._name, self._connect_seconds = name, connect_seconds
        self._run = f"isthmus-{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}"
        self._protocol = f"{self._run}/{frames.PAYLOAD_BYTES}"
        self._node = Node(self.settings)
        self._presence = Presence(self._node, self._run, name)
        self._matchmaker = Matchmaker(self._node, self._presence, self._run, name)
        self._place = place
        self._group: Group | None = None  # that the first rank met
        self._peer_ids = dict[str, str]()  # by name, of those who stand at this place in the workers of a sync
        self._mesh: Mesh | None = None
        self._keeping: asyncio.Future[None] | None = None
        self._woven = asyncio.Condition()
        self._waiting = 0  # streams that did not say what they are for, or came before this worker

    @property
    def name(self) -> str:
        """This worker's name."""
        return self._name

    @property
    def peer_id(self) -> str:
        """This worker's peer id, for the others' `allowed_peers`; empty until it has connected."""
        return self._node.peer_id

    def connect(self) -> None:
        """Start the daemon, join the swarm, announce this worker; see `Membership.connect`."""
        self._node.start(self._connect_seconds)
        atexit.register(self.leave)
        try:
            self._node.call(self._announce())
        except BaseException:
            self.leave()
            raise

    def addresses(self) -> list[str]:
        """Multiaddrs of this worker: initial peers for others."""
        return self._node.call(self._node.addresses())

    @property
    def contact(self) -> str:
        """This rank's peer id; see `Membership.contact`."""
        return self.peer_id

    def meet(self, card: Card, wait_seconds: float) -> Meeting:
        """See `Membership.meet`; a minority of the workers that seem alive gets a `TransportError` in the end."""
        self._group = self._node.call(self._meet(card, wait_seconds))
        return Meeting(self._group.id.hex(), self._group.cards)

    def gather_around(self, meeting: Meeting, names: list[str], weights: list[float]) -> BufferPeers:
        """See `Membership.gather_around`."""
        if self._place > 0:
            peer_ids = {name: self._contact_of(name, meeting.cards[name]) for name in names}
        elif self._group is not None and meeting.id == self._group.id.hex():
            peer_ids = self._group.peer_ids  # as they proved in the matchmaking
        else:
            raise TransportError("another meeting has begun since")
        if len(names) > 1:
            self._node.call(self._weave(bytes.fromhex(meeting.id), names, peer_ids))
        return StreamPeers(self._mesh, names.index(self._name), weights, self._call)

    def _contact_of(self, name: str, card: Card) -> str:
        """Peer id of the rank at this one's place in a worker."""
        contacts, place = card.get("contacts"), self._place
        peer_id = contacts[place] if isinstance(contacts, list) and place < len(contacts) else None
        if not isinstance(peer_id, str):
            raise TransportError(f"{name} does not say where its rank {place} is: is it an isthmus of this version?")
        if not self.settings.admits(peer_id):
            raise TransportError(f"rank {place} of {name}, peer {peer_id}, is not among allowed_peers: add it there")
        return peer_id

    def part(self) -> None:
        """See `Membership.part`."""
        self._node.call(self._unravel())

    def leave(self) -> None:
        """Say goodbye and end the daemon. A second call does nothing."""
        atexit.unregister(self.leave)
        with suppress(TransportError, TimeoutError):
            self._node.call(self._say_goodbye())
        self._node.stop()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        self._node.call(work)

    async def _announce(self) -> None:
        if self._place > 0:
            await self._node.answer(self._protocol, self._serve)
            self._keeping = asyncio.ensure_future(self._presence.keep(silent=True))
            return
        double = await self._presence.find_double()
        if double is not None:
            raise UserError(f"another worker calls itself {self._name} (peer {double}): names must be unique")
        await self._matchmaker.start()
        await self._node.answer(self._protocol, self._serve)
        await self._presence.announce()
        self._keeping = asyncio.ensure_future(self._presence.keep())

    async def _meet(self, card: Card, wait_seconds: float) -> Group:
        await self._unravel()
        self._presence.hurry()
        return await self._matchmaker.form(card, wait_seconds, self.grace_seconds)

    async def _weave(self, meeting: bytes, names: list[str], peer_ids: dict[str, str]) -> None:
        await self._unravel()
        self._peer_ids = peer_ids
        self._mesh = Mesh(meeting, names, names.index(self._name), self.sync_budget_seconds)
        self._mesh.open(lambda rank: self._node.dial(peer_ids[names[rank]], self._protocol))
        async with self._woven:
            self._woven.notify_all()

    async def _serve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A stream that another worker opened: closed again unless it is a member's, for this meeting."""
        if not self.settings.admits(peer_id) or self._waiting >= _MAX_WAITING:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                frame, _ = await frames.receive_any(reader, 0)
                async with self._woven:
                    await self._woven.wait_for(lambda: self._mesh and self._mesh.meeting == frame.meeting)
        except (TransportError, TimeoutError, OSError, EOFError):
            return
        finally:
            self._waiting -= 1
        mesh = self._mesh
        assert mesh is not None
        name = mesh.names[frame.sender] if frame.sender < len(mesh.names) else ""
        if frame.kind in (Kind.BULK, Kind.PULSE) and self._peer_ids.get(name) == peer_id:
            await mesh.serve(frame, (reader, writer))

    async def _unravel(self) -> None:
        if self._mesh is not None:
            await self._mesh.close()
            self._mesh = None

    async def _say_goodbye(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await self._unravel()
            if self._place == 0:
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._presence.withdraw()
