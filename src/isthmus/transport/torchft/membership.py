"""An elastic engine: torchft's lighthouse says who is there, a link between the workers moves the bytes."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

from typing_extensions import override

from isthmus.link import Group, Member, MemberLost
from isthmus.transport.address import split_address
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo, read_reachable
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.link_peers import LinkPeers
from isthmus.transport.peers import BufferPeers
from isthmus.transport.timeouts import TimedCalls
from isthmus.transport.torchft.lighthouse import LighthouseConnection

_LOGGER = logging.getLogger(__name__)
_PRESENT = memoryview(b"!")


class TorchFTMembership(Membership):
    """The workers that come to a lighthouse of torchft's.

    The lighthouse forms a quorum when all workers that beat have come, or, its grace being over, more than half of
    them. Those in it connect, or ask one another where they are connected already, so that nobody is counted who died
    or went away while it waited. Their connections live until the members change or one fails.

    A worker that came and took no part (it has to catch up first) does not count as alive until it comes again, so
    that the others need not wait for it.

    What a worker tells is signed, and who is not trusted does not count: those who only reach the lighthouse can at
    worst withhold what was told. All timeouts follow from the sync budget, the bound on one collective. Only the first
    rank of a worker speaks with the lighthouse.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        sync_budget_seconds: float = 60.0,
        rank_in_worker: int = 0,
    ) -> None:
        self.name = name
        self.sync_budget_seconds = sync_budget_seconds
        self._lighthouse = LighthouseConnection(lighthouse, name)
        self._rank_in_worker = rank_in_worker
        self._arrival_seconds = min(5.0, max(1.0, sync_budget_seconds / 6))  # for all who met to connect
        self._calls = TimedCalls()
        self._leaving, self._left = threading.Lock(), False
        self.link: LinkEnd | None = None
        self._ignored: set[str] = set()  # who was named in the log
        self._group: Group | None = None
        self._group_id, self._group_names = "", list[str]()
        self._looked_at: tuple[str, list[str]] | None = None  # at which rendezvous, and with whom, all were there

    @override
    def connect(self, link: LinkEnd) -> None:
        self.link = link
        if self._rank_in_worker == 0:
            self._lighthouse.connect(self.sync_budget_seconds)
        atexit.register(self.leave)

    @property
    @override
    def contact(self) -> str:
        """The connections that this rank has."""
        return self._group_id if self._group is not None and self._group.lost is None else ""

    @override
    def rendezvous(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        assert self.link is not None, "connect comes first"
        deadline = time.monotonic() + wait_seconds
        self._lighthouse.beats = True
        signed = self.link.trust.sign(self.name, info)
        while True:
            seconds = max(0.1, deadline - time.monotonic())
            quorum = self._lighthouse.ask(self._calls, seconds, self.link.announced, signed)
            addresses = {member.replica_id: member.store_address for member in quorum.participants}
            if addresses[self.name] != self.link.announced:
                raise TransportError(f"another process, at {addresses[self.name]}, calls itself {self.name} too")
            members = self._read({member.replica_id: member.data for member in quorum.participants})
            # the lighthouse counts its quorums anew when it restarts, and gives equal ones the same number
            rendezvous_id = f"{quorum.quorum_id}-{quorum.created.seconds}.{quorum.created.nanos:09d}"
            found = Rendezvous(rendezvous_id, members)
            try:
                self._connect_all(found, list(members))
            except (MemberLost, TransportError) as error:
                if time.monotonic() > deadline:
                    problem = f"of {', '.join(members)} not all came: {error}"
                    raise TransportError(f"no complete rendezvous within {wait_seconds:g} s ({problem})") from error
            else:
                self._lighthouse.beats = False
                return found

    @override
    def connect_peers(self, rendezvous: Rendezvous, names: list[str], weights: list[float]) -> BufferPeers:
        if self._rank_in_worker == 0 and (self._looked_at is None or rendezvous.id != self._looked_at[0]):
            raise TransportError("that rendezvous is over: come to another one")
        self._lighthouse.beats = True
        try:
            self._connect_all(rendezvous, names)
        except MemberLost as lost:
            raise TransportError(f"not all who came to the rendezvous came to the sync: {lost}") from lost
        return LinkPeers(self._group, names.index(self.name), weights, "this sync", self.sync_budget_seconds)

    @override
    def leave(self) -> None:
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._calls.cancel()
            self._lighthouse.close()
            self.disconnect_peers()
            atexit.unregister(self.leave)

    def _read(self, told: dict[str, Any]) -> dict[str, MemberInfo]:
        """Return the infos of those who are trusted and can be reached; the others are named in the log, once."""
        assert self.link is not None, "connect comes first"
        infos = {}
        for name, signed in told.items():
            try:
                infos[name] = read_reachable(self.link.trust.read(name, signed))
            except ValueError as error:
                if name not in self._ignored:
                    _LOGGER.warning("%s ignores %s at the lighthouse: %s", self.name, name, error)
                self._ignored.add(name)
        self.link.named = [link["key"] for info in infos.values() for link in info["links"]]
        return infos

    def _connect_all(self, rendezvous: Rendezvous, names: list[str]) -> None:
        """Connect with the workers of these names, all of whom do the same at this moment, or see that they are there.

        Raises:
            MemberLost: somebody is not.
        """
        assert self.link is not None, "connect comes first"
        if self._looked_at == (rendezvous.id, names):
            return
        rank, infos = self._rank_in_worker, [rendezvous.members[name] for name in names]
        if {info["contacts"][rank] for info in infos} == {self._group_id} and names == self._group_names:
            if self._group is not None:
                answers = [memoryview(bytearray(1)) for _ in names]
                self._group.exchange([_PRESENT] * len(names), answers, self._arrival_seconds)
        else:
            self.disconnect_peers()
            links = [info["links"][rank] for info in infos]
            members = [
                Member(number, f"worker {name}", split_address(link["address"]), link["key"])
                for number, (name, link) in enumerate(zip(names, links, strict=True))
            ]
            group_id = f"{rendezvous.id}/{','.join(names)}"
            if len(names) > 1:
                self._group = self.link.open(group_id, members, names.index(self.name), self._arrival_seconds)
            self._group_id, self._group_names = group_id, names
        self._looked_at = (rendezvous.id, names)

    @override
    def disconnect_peers(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._group_id, self._group_names, self._looked_at = None, "", [], None
