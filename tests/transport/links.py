"""Ends of the link for workers of this machine, and members of an elastic world that train nothing."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from isthmus.transport.elastic.history import CommitHistory
from isthmus.transport.elastic.member import ElasticMember
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.link_end import LinkEnd, LinkOptions
from isthmus.transport.peers import BufferPeers
from isthmus.transport.worker_group import SINGLE_RANK


def open_link(budget_seconds: float = 6.0, **options: Any) -> LinkEnd:
    """Open an end of the link as an elastic transport does."""
    options = {"host": "127.0.0.1"} | options
    seconds = min(0.5, budget_seconds / 20), min(10.0, budget_seconds / 3)
    return LinkEnd(LinkOptions(**options), "127.0.0.1", *seconds)


def connect(membership: Membership, budget_seconds: float = 6.0, **options: Any) -> ElasticMember:
    """Return a connected worker of one rank."""
    member = ElasticMember(membership, CommitHistory(None), {}, 1, False, 1, budget_seconds, 10 * budget_seconds)
    link = open_link(budget_seconds, **options)
    try:
        member.connect(SINGLE_RANK, link)
    except BaseException:
        link.close()
        raise
    return member


def meet(member: ElasticMember, wait_seconds: float = 20.0, **told: Any) -> Rendezvous:
    """Come to a rendezvous, and tell something more there."""
    return member._meet(member._info([member.peer_group.id]) | told, wait_seconds)


def everybody(member: ElasticMember, found: Rendezvous) -> BufferPeers:
    """Return the peers of a sync of all who came, with equal weights."""
    names = list(found.members)
    return member.peer_group.peers(found, names, [1 / len(names)] * len(names))


def break_connections(member: ElasticMember) -> None:
    """Break all connections of a worker with its peers at once, as if it had died."""
    assert member._link is not None
    assert member.peer_group._group is not None
    with member._link._changed:
        for channel in member.peer_group._group.channels.values():
            for lane in channel.lanes:
                socket.socket.shutdown(lane.connection, socket.SHUT_RDWR)


def leave(member: ElasticMember) -> None:
    """Leave as an elastic transport does."""
    member.membership.leave()
    if member._link is not None:
        member._link.close()


def check_the_engine_is_not_waited_for(a: ElasticMember, b: ElasticMember, c: ElasticMember) -> None:
    """Of three who have met one dies: the others meet, though one waits at the engine, where the dead one is alive."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, a)
        time.sleep(0.5)
        break_connections(c)
        begin = time.monotonic()
        found = meet(b)
        assert waiting.result() == found
    assert list(found.members) == ["a", "b"]
    assert time.monotonic() - begin < a.membership.forgets_seconds / 2
