"""An elastic engine: torchft's lighthouse says who is there, gloo moves the bytes."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from isthmus.core.torch_internals import make_gloo_group, skip_reverse_lookups
from isthmus.core.types import UserError
from isthmus.transport.address import join_address, own_address, split_address
from isthmus.transport.base import PeerLost, TransportError
from isthmus.transport.elastic.membership import Card, Meeting
from isthmus.transport.group_peers import GroupPeers
from isthmus.transport.heartbeat import Heartbeat
from isthmus.transport.peers import BufferPeers
from isthmus.transport.readable import first_line
from isthmus.transport.timeouts import TimedCalls
from isthmus.transport.torchft.lighthouse import LighthouseLine
from isthmus.transport.watched_group import AbandonedGroups, WatchedGroup, Works


@dataclass(frozen=True)
class _Member:
    """What one worker brought to a meeting."""

    card: Card
    store: str  # where its store is, host:port


class TorchFT:
    """`Membership` over torchft's lighthouse.

    The lighthouse forms a quorum when all workers that beat have come, or, its grace being over, more than half of
    them. Those in it meet at the store of the first by name and call the roll, so that nobody is counted who died or
    went away while it waited. Whoever then takes part in a sync is connected by gloo, in a group that lives until
    its members change or one fails.

    A worker that came and took no part (it has to catch up first) does not count as alive until it comes again, so
    that the others need not wait for it.

    Args:
        lighthouse: its address, host:port.
        name: of this worker: unique in the run, and the same again after a restart.
        sync_budget_seconds: bound on one collective; all other timeouts follow from it.
        host: how the other workers reach this machine; default: the address from which it reaches the lighthouse.
        place: of this rank in its worker: only the first one speaks with the lighthouse.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        sync_budget_seconds: float = 60.0,
        host: str | None = None,
        place: int = 0,
    ) -> None:
        self.name = name
        self.sync_budget_seconds = sync_budget_seconds
        self._line = LighthouseLine(lighthouse, name)
        self._host, self._place = host, place
        self._interval = min(0.5, sync_budget_seconds / 20)
        self._patience_seconds = min(10.0, sync_budget_seconds / 3)  # of silence, until a worker counts as gone
        self._roll_seconds = self._patience_seconds / 2
        self._calls = TimedCalls()
        self._leaving, self._left = threading.Lock(), False
        self._store: Any = None
        self._address = ""
        self._board: tuple[str, Any] | None = None  # where the last roll was called, and a connection
        self._meeting_id = ""
        self._group: WatchedGroup | None = None
        self._group_id, self._group_names = "", list[str]()
        self._abandoned = AbandonedGroups()

    def connect(self) -> None:
        """Reach the lighthouse, and open this worker's store to the others; see `Membership.connect`."""
        host = self._host = self._host or own_address(split_address(self._line.address)[0])
        try:
            dist.ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise UserError(f"{host} is no address of this machine ({first_line(error)})") from error
        skip_reverse_lookups()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._address = join_address(host, self._store.port)
        if self._place == 0:
            self._line.connect(self.sync_budget_seconds)
        atexit.register(self.leave)

    @property
    def contact(self) -> dict[str, str]:
        """This rank's store, and the group in which it stands; see `Membership.contact`."""
        intact = self._group is not None and self._group.lost is None
        return {"store": self._address, "group": self._group_id if intact else ""}

    def meet(self, card: Card, wait_seconds: float) -> Meeting:
        """See `Membership.meet`. Who comes alone while others are alive gets no meeting, but a `TransportError`."""
        deadline = time.monotonic() + wait_seconds
        self._line.counts = True
        while True:
            seconds = max(0.1, deadline - time.monotonic())
            quorum = self._line.ask(self._calls, seconds, self._address, card)
            members = {member.replica_id: _read(member) for member in quorum.participants}
            if members[self.name].store != self._address:
                raise TransportError(f"another process, at {members[self.name].store}, calls itself {self.name} too")
            # the lighthouse counts its quorums anew when it restarts, and gives equal ones the same number
            meeting_id = f"{quorum.quorum_id}-{quorum.created.seconds}.{quorum.created.nanos:09d}"
            absence = self._call_roll(meeting_id, members)
            if not absence:
                self._line.counts = False
                self._meeting_id = meeting_id
                return Meeting(meeting_id, {name: member.card for name, member in members.items()})
            if time.monotonic() > deadline:
                raise TransportError(f"no complete meeting within {wait_seconds:g} s ({absence})")

    def gather_around(self, meeting: Meeting, names: list[str], weights: list[float]) -> BufferPeers:
        """See `Membership.gather_around`."""
        if self._place == 0 and meeting.id != self._meeting_id:
            raise TransportError("that meeting is over: meet again")
        self._line.counts = True
        self._abandoned.free()
        rank, contacts = names.index(self.name), [_contact(name, meeting.cards[name], self._place) for name in names]
        if {contact["group"] for contact in contacts} != {self._group_id} or names != self._group_names:
            self.part()
            if len(names) > 1:
                self._form_group(f"{meeting.id}/{','.join(names)}", names, rank, contacts[0]["store"])
        return _Peers(self._group, rank, weights, "this sync")

    def leave(self) -> None:
        """See `Membership.leave`. A meeting under way ends with a `TransportError`."""
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._calls.cancel()
            self._line.close()
            self.part()
            self._store = self._board = None
            atexit.unregister(self.leave)

    def _call_roll(self, meeting_id: str, members: dict[str, _Member]) -> str:
        """See whether all came; empty when they did, else why not."""
        if len(members) == 1:
            return ""
        address = next(iter(members.values())).store
        keys = [f"{meeting_id}/{name}" for name in members]

        def call() -> Any:
            board = self._board[1] if self._board and self._board[0] == address else self._open_store(address)
            board.set(f"{meeting_id}/{self.name}", "")
            board.wait(keys, timedelta(seconds=self._roll_seconds))
            return board

        try:
            self._board = (address, self._calls.call(2 * self._roll_seconds, call))
        except RuntimeError as error:
            self._board = None
            return f"of {', '.join(members)} not all came: {first_line(error)}"
        return ""

    def _form_group(self, group_id: str, names: list[str], rank: int, holder: str) -> None:
        """Connect with the others at the store `holder`; all of them come from the same meeting at this moment."""
        size = len(names)
        people = [f"worker {name}" for name in names]

        def assemble() -> tuple[Heartbeat, list[str], Any]:
            connection = self._open_store(holder)
            heartbeat = Heartbeat(PrefixStore(f"{group_id}/beat", connection), rank, size, 0, self._interval)
            missing = heartbeat.wait_for_all(self._roll_seconds)
            return heartbeat, [people[other] for other in missing], connection.clone()

        try:
            heartbeat, missing, connection = self._calls.call(self._patience_seconds, assemble)
        except RuntimeError as error:
            raise TransportError(
                f"{people[0]}, which holds the store, is gone, or this worker is cut off ({first_line(error)})"
            ) from error
        if missing:
            raise TransportError(f"{', '.join(missing)} met the others, but did not come to the sync")
        heartbeat.start(people)
        self._group = WatchedGroup(
            heartbeat, self.sync_budget_seconds, self._patience_seconds, "gloo", self._abandoned.add
        )
        self._group_id, self._group_names = group_id, names
        store = PrefixStore(f"{group_id}/gloo", connection)
        with _losses_are_refusals():
            self._group.connect(
                lambda: self._calls.call(self._patience_seconds, lambda: self._connect_gloo(store, rank, size))
            )

    def _connect_gloo(self, store: Any, rank: int, size: int) -> dist.ProcessGroup:
        """Connect a group that listens where this worker says it does."""
        # twice the budget: `WatchedGroup` watches the time itself, and knows better whom to blame
        timeout = timedelta(seconds=2 * self.sync_budget_seconds)
        return make_gloo_group(store, rank, size, self._host or "", timeout)

    def _open_store(self, address: str) -> Any:
        """A new connection to the store of a worker."""
        if address == self._address:
            return self._store.clone()
        host, port = split_address(address)
        timeout = timedelta(seconds=self._roll_seconds)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def part(self) -> None:
        """See `Membership.part`."""
        if self._group is not None:
            self._group.close(lambda group: None, linger_seconds=0)
        self._group, self._group_id, self._group_names = None, "", []


class _Peers(GroupPeers):
    """The members of one sync; a loss refuses it."""

    def _run(self, kind: str, start: Callable[[dist.ProcessGroup], Works]) -> None:
        with _losses_are_refusals():
            super()._run(kind, start)


@contextmanager
def _losses_are_refusals() -> Iterator[None]:
    """In an elastic world the run goes on with those who are left."""
    try:
        yield
    except PeerLost as lost:
        raise TransportError(str(lost)) from lost


def _read(member: Any) -> _Member:
    """What a `torchft._torchft.QuorumMember` brought, checked: it comes from another machine."""
    if not isinstance(member.data, dict):
        raise _stranger(member.replica_id)
    return _Member(member.data, member.store_address)


def _contact(name: str, card: Card, place: int) -> dict[str, str]:
    """Of the rank at this place of a worker."""
    contacts = card.get("contacts")
    match contacts[place] if isinstance(contacts, list) and place < len(contacts) else None:
        case {"store": str(store), "group": str(group)}:
            return {"store": store, "group": group}
    raise _stranger(name)


def _stranger(name: str) -> TransportError:
    return TransportError(f"worker {name} speaks another language: is it an isthmus of this version?")
