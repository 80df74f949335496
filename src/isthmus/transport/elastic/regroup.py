"""What follows a death: those who are left meet over their own connections, as an engine takes seconds to see it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from isthmus.link import MemberLost
from isthmus.transport.base import TransportError
from isthmus.transport.elastic.election import leaders
from isthmus.transport.elastic.member_info import MemberInfo, read_told
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.elastic.peer_group import PeerGroup
from isthmus.transport.wire import all_gather_object


class Regroup:
    """The rendezvous of those who are left of a group of which members died.

    An engine has its workers wait for one that died until it is sure of that, or their grace is over. Those who had a
    connection with it know at once: they connect without it, and tell one another what they would have told the engine.
    They meet like this, all or none, until the engine has forgotten the dead or somebody else comes to it; whoever does
    not get through asks the engine, and finds the others there.

    Only more than half of those whom the engine has seen together may go on like this, so that not two parts do.

    Args:
        peer_group: of the first rank of this worker.
        membership: the engine.
        is_allowed: no two parts of the run could commit without the engine.
    """

    def __init__(self, peer_group: PeerGroup, membership: Membership, is_allowed: bool) -> None:
        self._peer_group, self._membership, self._is_allowed = peer_group, membership, is_allowed
        self._num_workers = 0  # at the last rendezvous of the engine
        self._goes_on = False  # those who are left meet like this next time, too
        self._count = 0  # of the rendezvous over the present group
        self._lookout = Lookout(membership)

    def note(self, found: Rendezvous) -> None:
        """Take note of a rendezvous of the engine."""
        self._num_workers = len(found.members)

    def is_due(self) -> bool:
        """Return whether somebody died, and those who are left meet without the engine."""
        names, _ = self._peer_group.remaining()
        return self._is_allowed and 2 * len(names) > self._num_workers > 0

    def meet(self, info: MemberInfo) -> Rendezvous | None:
        """Return the rendezvous of those who are left; None where the engine has to be asked."""
        is_due, goes_on, self._goes_on = self.is_due(), self._goes_on, False
        found = None
        if is_due or (goes_on and self._peer_group.is_intact):
            try:
                if is_due:
                    names, silent_seconds = self._peer_group.remaining()
                    self._peer_group.reopen(names)
                    self._count = 0
                    self._lookout.begin(info, self._membership.forgets_seconds - silent_seconds)
                found = self._gather(info | {"groups": [self._peer_group.id, *info["groups"][1:]]})
            except (MemberLost, TransportError, ValueError):  # the last: what was told cannot be read
                self._peer_group.close()
        if not self._goes_on:
            self._lookout.end()
        return found

    def _gather(self, info: MemberInfo) -> Rendezvous | None:
        """Return what all have told one another; None where one of them says that the engine is to be asked."""
        peers = self._peer_group.peers_for("the rendezvous of those who are left")
        own = info | {"meets_directly": not self._lookout.is_over}
        told = [read_told(each) for each in all_gather_object(peers.all_gather, own)]
        if not all(each["meets_directly"] for each in told):
            return None
        members = {
            name: each | {"meets_directly": False} for name, each in zip(self._peer_group.names, told, strict=True)
        }
        self._goes_on = leaders(members) == list(members)
        self._count += 1
        return Rendezvous(f"{self._peer_group.id}+{self._count}", members)


class Lookout:
    """Asks the engine meanwhile, until it has forgotten the dead or somebody has come to it who does not only look."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_over = False

    def begin(self, info: MemberInfo, seconds: float) -> None:
        """Begin to ask, for so many seconds at most."""
        self.end()
        self._ended, self.is_over = threading.Event(), False
        arguments = info | {"meets_directly": True}, time.monotonic() + seconds
        self._thread = threading.Thread(target=self._look, args=arguments, name="isthmus-lookout", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask no more. A second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _look(self, info: MemberInfo, until: float) -> None:
        all_look = True
        with suppress(TransportError):
            while all_look and not self._ended.is_set() and (left := until - time.monotonic()) > 0:
                found = self._membership.rendezvous(info, left, self._ended.is_set)
                all_look = all(each.get("meets_directly") is True for each in found.members.values())
        self.is_over = True
