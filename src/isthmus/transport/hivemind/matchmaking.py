"""Workers matched by hivemind's matchmaking, without its averager.

hivemind elects as leader whoever declared the earliest deadline in the DHT; the others ask it to be let in. When a
group is complete is decided here, by the leader: hivemind itself knows only a number of peers, or a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not see that the other one streams)

from hivemind.averaging.matchmaking import Matchmaking  # type: ignore[import-untyped]
from hivemind.p2p import P2PContext, PeerID, ServicerBase  # type: ignore[import-untyped]
from hivemind.proto import averaging_pb2  # type: ignore[import-untyped]
from hivemind.utils import ValueWithExpiration, get_dht_time  # type: ignore[import-untyped]

from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.presence import Presence, PresenceRecord
from isthmus.transport.hivemind.worker_records import WorkerRecords

MAX_INFO_BYTES = 1 << 16
_VERSION = b"isthmus 1"
_REQUEST_SECONDS = 2.0  # for a leader to answer
_TICK_SECONDS = 0.02
_LOOK_SECONDS = 0.5  # between two looks into the DHT while somebody is missing
_SOLO_SECONDS = 0.5  # that a worker waits for company where nobody else is alive
_NEVER = 1 << 30


class Matchmaker:
    """Matches this worker with the other workers of a run, again and again; those of other runs do not count."""

    def __init__(self, node: Node, records: WorkerRecords, presence: Presence, run: str, name: str) -> None:
        self._node, self._records, self._presence, self._run, self._name = node, records, presence, run, name
        self._expires = 0.0  # of what this worker declared last; DHT time

    async def start(self) -> None:
        """Begin to answer workers that ask to follow this one."""
        self._matchmaking = Matchmaking(
            self._node.p2p,
            _VERSION,
            _DHT(self._records, self._presence, self._node.p2p.peer_id),
            servicer_type=_JoinService,
            prefix=self._run,
            target_group_size=None,
            min_group_size=_NEVER,  # else it would go alone as soon as it is declared
            min_matchmaking_time=0.0,  # each declares its own deadline
            request_timeout=_REQUEST_SECONDS,
            client_mode=False,
        )
        await _JoinService(self._matchmaking, self._admits).add_p2p_handlers(self._node.p2p, namespace=self._run)

    async def match(self, info: MemberInfo, wait_seconds: float, grace_seconds: float) -> Rendezvous:
        """Find the other workers that are alive, and return their rendezvous.

        `wait_seconds` bounds the whole; after `grace_seconds` a majority need not wait for those who are alive but do
        not come.
        """
        message, start = self._dump(info), asyncio.get_running_loop().time()
        records = dict[str, PresenceRecord]()
        while not (records and _seconds_since(start) > wait_seconds):
            records, _ = await self._presence.find_alive({self._node.peer_id})
            # the DHT takes only records that expire later than the one before, so each attempt does
            self._expires = max(get_dht_time() + wait_seconds, self._expires + 2 * _TICK_SECONDS)
            look = asyncio.ensure_future(self._matchmaking.look_for_group(_StepControl(message, self._expires)))
            try:
                records = await self._watch(look, start, wait_seconds, grace_seconds) or records
                if look.done() and look.result() is not None:
                    return self._check(look.result())
            finally:
                look.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await look
        missing = ", ".join(sorted(one.name for peer_id, one in records.items() if peer_id != self._node.peer_id))
        if not missing:
            raise TransportError(f"no rendezvous within {wait_seconds:.1f} s: this worker saw no other one")
        raise TransportError(f"no majority of the workers came within {wait_seconds:.1f} s: waited for {missing}")

    async def _watch(
        self, look: asyncio.Future[Any], start: float, wait_seconds: float, grace_seconds: float
    ) -> dict[str, PresenceRecord]:
        """Complete the match if this worker leads, until there is one or a new try is due; returns who is alive."""
        matchmaking, looked = self._matchmaking, 0.0
        records, silent = dict[str, PresenceRecord](), set[str]()
        while not look.done() and _seconds_since(start) < wait_seconds:
            leader = matchmaking.current_leader
            here = {self._node.peer_id, *map(str, matchmaking.current_followers)}
            if _seconds_since(looked) > _LOOK_SECONDS:
                records, silent = await self._presence.find_alive(here)
                looked = asyncio.get_running_loop().time()
                matchmaking.potential_leaders.update_triggered.set()  # it does not always look again by itself
            elif leader is None and _is_complete(here, records, silent, _seconds_since(start), grace_seconds):
                await self._complete(here)
            if leader is not None and str(leader) in silent:
                break  # else it would be waited for until its deadline
            await asyncio.wait({look}, timeout=_TICK_SECONDS)
        return records

    async def _complete(self, here: set[str]) -> None:
        matchmaking = self._matchmaking
        async with matchmaking.lock_request_join_group:
            unchanged = here == {self._node.peer_id, *map(str, matchmaking.current_followers)}
            leads = matchmaking.current_leader is None and matchmaking.is_looking_for_group
            if unchanged and leads and not matchmaking.assembled_group.done():
                await matchmaking.leader_assemble_group()

    def _admits(self, peer_id: str, data: bytes) -> bool:
        """Return whether a peer that asks may follow this worker: it is trusted, and its name is nobody else's."""
        try:
            name, _ = self._load(peer_id, data)
            followers = self._matchmaking.current_followers.items()
            others = [self._load(str(peer), request.gather)[0] for peer, request in followers if str(peer) != peer_id]
        except TransportError:
            return False
        return self._node.settings.admits(peer_id) and name not in (self._name, *others)

    def _check(self, group_info: Any) -> Rendezvous:
        peer_ids = [str(peer_id) for peer_id in group_info.peer_ids]
        told = [
            (*self._load(peer_id, data), peer_id) for data, peer_id in zip(group_info.gathered, peer_ids, strict=True)
        ]
        members = {name: info for name, info, _ in sorted(told, key=lambda one: one[0])}
        by_name = {name: peer_id for name, _, peer_id in told}
        mine = by_name.get(self._name) == self._node.peer_id
        if not mine or len(members) < len(told) or not all(map(self._node.settings.admits, peer_ids)):
            raise TransportError("the leader of the rendezvous sent a list of members that cannot be")
        return Rendezvous(group_info.group_id.hex(), members)

    def _dump(self, info: MemberInfo) -> bytes:
        signed = self._node.trust.sign(_teller(self._name, self._node.peer_id), info)
        data = json.dumps({"name": self._name, **signed}).encode()
        if len(data) > MAX_INFO_BYTES:
            raise ValueError(f"the info of {self._name} takes {len(data)} bytes, at most {MAX_INFO_BYTES} are allowed")
        return data

    def _load(self, peer_id: str, data: bytes) -> tuple[str, MemberInfo]:
        """Return the name and the info that a peer told, or refuse it."""
        try:
            message = json.loads(data) if len(data) <= MAX_INFO_BYTES else None
            match message:
                case {"name": str(name)} if name:
                    return name, self._node.trust.read(_teller(name, peer_id), message)
        except (ValueError, RecursionError) as error:
            raise TransportError(f"what peer {peer_id} told cannot be believed: {error}") from error
        raise TransportError(f"peer {peer_id} told no member info: install the same version of isthmus everywhere")


def _teller(name: str, peer_id: str) -> str:
    """Return whose word a signature is: no other peer can tell the same."""
    return f"{name}, peer {peer_id}"


@dataclass
class _StepControl:
    """Stands in for hivemind's `StepControl`, which lives in shared memory, before its matchmaking."""

    data_for_gather: bytes
    scheduled_time: float  # DHT time

    @property
    def deadline(self) -> float:
        return self.scheduled_time

    def get_timeout(self) -> float:
        return max(0.0, self.deadline - float(get_dht_time()))


class _DHT:
    """Stands in for hivemind's `DHT`, which lives in a process, before its matchmaking."""

    def __init__(self, records: WorkerRecords, presence: Presence, peer_id: PeerID) -> None:
        self._records, self._presence, self.peer_id = records, presence, peer_id

    async def store(self, *, key: str, value: bool, expiration_time: float, **rest: Any) -> bool:
        return await self._records.store(key, value, expiration_time)

    async def get(self, key: str, **options: Any) -> ValueWithExpiration:
        await asyncio.sleep(2 * _TICK_SECONDS)  # it asks again as soon as it has an answer
        declared = {
            PeerID.from_base58(peer_id).to_bytes(): ValueWithExpiration(*record)
            for peer_id, record in (await self._records.read(key)).items()
            if peer_id in self._presence.reachable  # one that is gone takes seconds, in which nobody else is heard
        }
        return ValueWithExpiration(declared, 0.0)


class _JoinService(ServicerBase):  # type: ignore[misc]
    """Serves the workers that ask to follow this one."""

    def __init__(self, matchmaking: Any, admits: Callable[[str, bytes], bool]) -> None:
        self._matchmaking, self._admits = matchmaking, admits

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a worker that asks to follow this one, as `Matchmaking.rpc_join_group` does, if it is admitted."""
        if not self._admits(str(context.remote_id), request.gather):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in self._matchmaking.rpc_join_group(request, context):
            yield message


def _is_complete(
    here: set[str], records: dict[str, PresenceRecord], silent: set[str], waited_seconds: float, grace_seconds: float
) -> bool:
    """Return whether to wait no longer. Only a majority of those who seem alive may go on, or the run could split."""
    missing, known = records.keys() - here, here & records.keys()
    first = min(records, key=lambda peer_id: records[peer_id].name, default="")
    if missing and 2 * len(known) + (first in known) <= len(records):  # half of them go on with the first name only
        return False
    if missing <= silent:
        return len(here) > 1 or waited_seconds > _SOLO_SECONDS
    return waited_seconds > grace_seconds


def _seconds_since(start: float) -> float:
    return asyncio.get_running_loop().time() - start
