"""What follows a death: those who are left meet over their own connections, as an engine takes seconds to see it."""

from __future__ import annotations

import time

from isthmus.link import MemberLost
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.election import leaders
from isthmus.transport.elastic.member_info import MemberInfo, read_told
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.elastic.peer_group import PeerGroup
from isthmus.transport.wire import all_gather_object


class Regroup:
    """The rendezvous of those who are left of a group of which members died.

    An engine has its workers wait for one that died until it is sure of that, or their grace is over. Those who had a
    connection with it know at once: they connect without it, and tell one another what they would have told the engine.
    For as long as that would still wait they meet like this, all or none; whoever does not get through asks the engine,
    and finds the others there.

    Only more than half of those whom the engine has seen together may go on like this, so that not two parts do.

    Args:
        peer_group: of the first rank of this worker.
        forgets_seconds: see `Membership`.
        is_allowed: no two parts of the run could commit without the engine.
    """

    def __init__(self, peer_group: PeerGroup, forgets_seconds: float, is_allowed: bool) -> None:
        self._peer_group, self._forgets_seconds, self._is_allowed = peer_group, forgets_seconds, is_allowed
        self._num_workers = 0  # at the last rendezvous of the engine
        self._goes_on, self._until = False, 0.0  # whether all have said that they meet again like this; own wish
        self._count = 0  # of the rendezvous over the present group

    def note(self, found: Rendezvous) -> None:
        """Take note of a rendezvous of the engine."""
        self._num_workers, self._goes_on = len(found.members), False

    def is_due(self) -> bool:
        """Return whether somebody died, and those who are left meet without the engine."""
        names, _ = self._peer_group.remaining()
        return self._is_allowed and 2 * len(names) > self._num_workers > 0

    def meet(self, info: MemberInfo) -> Rendezvous | None:
        """Return the rendezvous of those who are left; None where the engine has to be asked."""
        is_due, goes_on, self._goes_on = self.is_due(), self._goes_on, False
        if not is_due and not (goes_on and self._peer_group.is_intact):
            return None
        try:
            if is_due:
                names, silent_seconds = self._peer_group.remaining()
                now = time.monotonic()
                self._until = max(self._until if goes_on else 0.0, now + self._forgets_seconds - silent_seconds)
                self._peer_group.reopen(names)
                self._count = 0
            return self._gather(info | {"groups": [self._peer_group.id, *info["groups"][1:]]})
        except (MemberLost, TransportError, ValueError):  # the last: what was told cannot be read
            self._peer_group.close()
            return None

    def _gather(self, info: MemberInfo) -> Rendezvous:
        """Tell the others, and return what all have told; all know alike whether they meet like this again."""
        peers = self._peer_group.peers_for("the rendezvous of those who are left")
        own = info | {"meets_again": time.monotonic() < self._until}
        told = [read_told(each) for each in all_gather_object(peers.all_gather, own)]
        members = dict(zip(self._peer_group.names, told, strict=True))
        self._goes_on = all(each["meets_again"] for each in told) and leaders(members) == list(members)
        self._count += 1
        return Rendezvous(f"{self._peer_group.id}+{self._count}", members)
