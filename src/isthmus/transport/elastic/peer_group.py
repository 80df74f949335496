"""The connections of a worker's rank with its peers, which move the bytes of its syncs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from isthmus.link import Group, Member, MemberLost
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import member_of
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.link_peers import LinkPeers

_PRESENT = memoryview(b"!")


class PeerGroup:
    """A group of the link among ranks of the same number, one of each worker of a sync.

    It lives until its members change or one of them fails. Every worker tells which group its ranks have, so all know
    alike whether to keep it; then they only tell one another that they are there, while the sync begins.

    Args:
        name: of this worker.
        link: of this rank.
        rank_in_worker: of this rank.
        sync_budget_seconds: bound on one collective.
    """

    def __init__(self, name: str, link: LinkEnd, rank_in_worker: int, sync_budget_seconds: float) -> None:
        self._name, self._link, self._rank = name, link, rank_in_worker
        self._sync_budget_seconds = sync_budget_seconds
        self._arrival_seconds = min(5.0, max(1.0, sync_budget_seconds / 6))  # for all who met to connect
        self._group: Group | None = None
        self._members: list[Member] = []
        self._id, self.names = "", list[str]()  # of the group, and its workers in rank order
        self._looked_at: tuple[str, list[str]] | None = None  # which rendezvous it is connected for, and with whom
        self._arrival: tuple[int, float] | None = None  # the exchange in which all say that they are there; its bound

    @property
    def id(self) -> str:
        """The group that this rank has, unlike any other one of the run; empty where it has none."""
        return self._id if self._group is not None and self._group.lost is None else ""

    @property
    def is_intact(self) -> bool:
        """Whether this rank has a group of which nobody is known to be lost."""
        return self._group is not None and self._group.lost is None and not self._group.left

    def remaining(self) -> tuple[list[str], float]:
        """Return who is left of a group whose other members died, and the seconds since the last sign of life of these.

        The names are empty where this rank has no such group, or is among those that the others regard as dead.
        """
        dead = [] if self._group is None else self._group.dead
        if self._group is None or not dead or self.names.index(self._name) in dead:
            return [], 0.0
        names = [name for rank, name in enumerate(self.names) if rank not in dead]
        return names, min(map(self._group.silent_seconds, dead))

    def reopen(self, names: list[str]) -> None:
        """Connect with those who are left of a group, all of whom do the same at this moment.

        Raises:
            MemberLost: somebody does not.
        """
        members = [self._members[self.names.index(name)] for name in names]
        group_id = f"rest-{_digest([self._id, *names])}"
        self.close()
        self._open(group_id, names, [replace(member, number=number) for number, member in enumerate(members)])

    def peers_for(self, purpose: str) -> LinkPeers:
        """Return the members of the group as peers who have to answer at once; errors name the purpose."""
        weights = [1 / len(self.names)] * len(self.names)
        return LinkPeers(self._group, self.names.index(self._name), weights, purpose, self._arrival_seconds)

    def admit(self, found: Rendezvous) -> None:
        """Let in those who came to a rendezvous, as far as they are trusted; they help one another to be reached."""
        self._link.named = [link["key"] for info in found.members.values() for link in info["links"]]
        ranks = {name: info for name, info in found.members.items() if self._rank < len(info["links"])}
        self._link.meet(member_of(name, info, self._rank) for name, info in ranks.items())

    def come_to(self, found: Rendezvous, names: list[str]) -> None:
        """Let workers of a rendezvous reach this rank even where it has to come to them."""
        self._link.register_at(member_of(name, found.members[name], self._rank) for name in names)

    def connect(self, found: Rendezvous, names: list[str]) -> None:
        """Connect with workers of a rendezvous, all of whom do the same at this moment, or ask whether they are there.

        Whether they are turns out with the first collective: to wait for it here would take the time of one way across.
        A worker that is none of them, because it has to catch up, leaves its peers to them.

        Raises:
            MemberLost: somebody is not there.
        """
        if self._looked_at == (found.id, names):
            return
        if self._name not in names:
            self.close()
            return
        groups = {found.members[name]["groups"][self._rank] for name in names}
        if groups == {self._id} and names == self.names:
            if self._group is not None:
                answers = [memoryview(bytearray(1)) for _ in names]
                self._arrival = self._group.start([_PRESENT] * len(names), answers), self._arrival_seconds
        else:
            self.close()
            members = [member_of(name, found.members[name], self._rank, number) for number, name in enumerate(names)]
            self._open(f"{found.id}-{_digest(names)}", names, members)
        self._looked_at = (found.id, names)

    def peers(self, found: Rendezvous, names: list[str], weights: list[float]) -> LinkPeers:
        """Return the peers of a sync: workers of a rendezvous, in rank order, and each one's share in the mean.

        Raises:
            TransportError: not all of them are there.
        """
        try:
            self.connect(found, names)
        except MemberLost as lost:
            raise TransportError(f"not all who came to the rendezvous came to the sync: {lost}") from lost
        peers = LinkPeers(self._group, names.index(self._name), weights, "this sync", self._sync_budget_seconds)
        peers.arrival, self._arrival = self._arrival, None
        return peers

    def _open(self, group_id: str, names: list[str], members: list[Member]) -> None:
        if len(names) > 1:
            self._group = self._link.open(group_id, members, names.index(self._name), self._arrival_seconds)
        self._id, self.names, self._members = group_id, names, members

    def close(self) -> None:
        """Leave the peers: they need not wait for this rank."""
        if self._group is not None:
            self._group.close()
        self._group, self._id, self.names, self._looked_at, self._arrival = None, "", [], None, None


def _digest(names: list[str]) -> str:
    return hashlib.blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()
