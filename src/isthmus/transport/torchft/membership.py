"""An elastic engine: torchft's lighthouse says who is there, gloo moves the bytes."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from isthmus.core.torch_internals import make_gloo_group, skip_reverse_lookups
from isthmus.core.types import UserError
from isthmus.transport.address import join_address, own_address, split_address
from isthmus.transport.base import TransportError, readable_message
from isthmus.transport.elastic.membership import MemberInfo, Membership, Rendezvous
from isthmus.transport.group_peers import GroupPeers
from isthmus.transport.heartbeat import Heartbeat
from isthmus.transport.peers import BufferPeers
from isthmus.transport.timeouts import TimedCalls
from isthmus.transport.torchft.lighthouse import LighthouseConnection
from isthmus.transport.watched_group import AbandonedGroups, WatchedGroup


class TorchFTMembership(Membership):
    """The workers that come to a lighthouse of torchft's.

    The lighthouse forms a quorum when all workers that beat have come, or, its grace being over, more than half of
    them. Those in it check at the store of the first by name that all are there, so that nobody is counted who died or
    went away while it waited. Whoever then takes part in a sync is connected by gloo, in a group that lives until
    its members change or one fails.

    A worker that came and took no part (it has to catch up first) does not count as alive until it comes again, so
    that the others need not wait for it.

    All timeouts follow from the sync budget, the bound on one collective. `host` is how the other workers reach this
    machine; None: the address from which it reaches the lighthouse. Only the first rank of a worker speaks with that.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        sync_budget_seconds: float = 60.0,
        host: str | None = None,
        rank_in_worker: int = 0,
    ) -> None:
        self.name = name
        self.sync_budget_seconds = sync_budget_seconds
        self._lighthouse = LighthouseConnection(lighthouse, name)
        self._host, self._rank_in_worker = host, rank_in_worker
        self._interval = min(0.5, sync_budget_seconds / 20)
        self._patience_seconds = min(10.0, sync_budget_seconds / 3)  # of silence, until a worker counts as gone
        self._arrival_seconds = self._patience_seconds / 2
        self._calls = TimedCalls()
        self._leaving, self._left = threading.Lock(), False
        self._store: Any = None
        self._address = ""
        self._shared_store: tuple[str, Any] | None = None  # of the last rendezvous: address and connection
        self._rendezvous_id = ""
        self._group: WatchedGroup | None = None
        self._group_id, self._group_names = "", list[str]()
        self._abandoned = AbandonedGroups()

    @override
    def connect(self) -> None:
        host = self._host = self._host or own_address(split_address(self._lighthouse.address)[0])
        try:
            dist.ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise UserError(f"{host} is no address of this machine ({readable_message(error)})") from error
        skip_reverse_lookups()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._address = join_address(host, self._store.port)
        if self._rank_in_worker == 0:
            self._lighthouse.connect(self.sync_budget_seconds)
        atexit.register(self.leave)

    @property
    @override
    def contact(self) -> dict[str, str]:
        intact = self._group is not None and self._group.lost is None
        return {"store": self._address, "group": self._group_id if intact else ""}

    @override
    def rendezvous(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        deadline = time.monotonic() + wait_seconds
        self._lighthouse.beats = True
        while True:
            seconds = max(0.1, deadline - time.monotonic())
            quorum = self._lighthouse.ask(self._calls, seconds, self._address, info)
            members = {member.replica_id: member.data for member in quorum.participants}
            stores = {member.replica_id: member.store_address for member in quorum.participants}
            for name, told in members.items():
                if not isinstance(told, dict):  # it comes from another machine
                    raise _unreadable(name)
            if stores[self.name] != self._address:
                raise TransportError(f"another process, at {stores[self.name]}, calls itself {self.name} too")
            # the lighthouse counts its quorums anew when it restarts, and gives equal ones the same number
            rendezvous_id = f"{quorum.quorum_id}-{quorum.created.seconds}.{quorum.created.nanos:09d}"
            problem = self._check_arrivals(rendezvous_id, stores)
            if not problem:
                self._lighthouse.beats = False
                self._rendezvous_id = rendezvous_id
                return Rendezvous(rendezvous_id, members)
            if time.monotonic() > deadline:
                raise TransportError(f"no complete rendezvous within {wait_seconds:g} s ({problem})")

    @override
    def connect_peers(self, rendezvous: Rendezvous, names: list[str], weights: list[float]) -> BufferPeers:
        if self._rank_in_worker == 0 and rendezvous.id != self._rendezvous_id:
            raise TransportError("that rendezvous is over: come to another one")
        self._lighthouse.beats = True
        self._abandoned.free()
        rank = names.index(self.name)
        contacts = [_contact(name, rendezvous.members[name], self._rank_in_worker) for name in names]
        if {contact["group"] for contact in contacts} != {self._group_id} or names != self._group_names:
            self.disconnect_peers()
            if len(names) > 1:
                self._form_group(f"{rendezvous.id}/{','.join(names)}", names, rank, contacts[0]["store"])
        return GroupPeers(self._group, rank, weights, "this sync")

    @override
    def leave(self) -> None:
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._calls.cancel()
            self._lighthouse.close()
            self.disconnect_peers()
            self._store = self._shared_store = None
            atexit.unregister(self.leave)

    def _check_arrivals(self, rendezvous_id: str, stores: dict[str, str]) -> str:
        """Return why not all members came to the store of the first; empty when they did."""
        if len(stores) == 1:
            return ""
        address = next(iter(stores.values()))
        keys = [f"{rendezvous_id}/{name}" for name in stores]

        def call() -> Any:
            known = self._shared_store
            store = known[1] if known and known[0] == address else self._open_store(address)
            store.set(f"{rendezvous_id}/{self.name}", "")
            store.wait(keys, timedelta(seconds=self._arrival_seconds))
            return store

        try:
            self._shared_store = (address, self._calls.call(2 * self._arrival_seconds, call))
        except RuntimeError as error:
            self._shared_store = None
            return f"of {', '.join(stores)} not all came: {readable_message(error)}"
        return ""

    def _form_group(self, group_id: str, names: list[str], rank: int, holder: str) -> None:
        """Connect with the others at the store `holder`; all of them come from the same rendezvous at this moment."""
        size, people = len(names), [f"worker {name}" for name in names]

        def find_members() -> tuple[Heartbeat, list[str], Any]:
            connection = self._open_store(holder)
            heartbeat = Heartbeat(PrefixStore(f"{group_id}/beat", connection), rank, size, 0, self._interval)
            missing = heartbeat.wait_for_all(self._arrival_seconds)
            return heartbeat, [people[other] for other in missing], connection.clone()

        try:
            heartbeat, missing, connection = self._calls.call(self._patience_seconds, find_members)
        except RuntimeError as error:
            raise TransportError(
                f"{people[0]}, which holds the store, is gone, or this worker is cut off ({readable_message(error)})"
            ) from error
        if missing:
            raise TransportError(f"{', '.join(missing)} came to the rendezvous, but not to the sync")
        heartbeat.start(people)
        seconds, patience_seconds = self.sync_budget_seconds, self._patience_seconds
        abandon = self._abandoned.add
        self._group = WatchedGroup(heartbeat, seconds, patience_seconds, abandon=abandon, free=lambda group: None)
        self._group_id, self._group_names = group_id, names
        store = PrefixStore(f"{group_id}/gloo", connection)
        # twice the budget: `WatchedGroup` watches the time itself, and knows better whom to blame
        timeout = timedelta(seconds=2 * seconds)
        make = partial(make_gloo_group, store, rank, size, self._host or "", timeout)
        self._group.connect(partial(self._calls.call, self._patience_seconds, make))

    def _open_store(self, address: str) -> Any:
        """Return a new connection to the store of a worker."""
        if address == self._address:
            return self._store.clone()
        host, port = split_address(address)
        timeout = timedelta(seconds=self._arrival_seconds)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    @override
    def disconnect_peers(self) -> None:
        if self._group is not None:
            self._group.close(linger_seconds=0)
        self._group, self._group_id, self._group_names = None, "", []


def _contact(name: str, info: MemberInfo, rank: int) -> dict[str, str]:
    """Return the contact of one rank of a worker."""
    contacts = info.get("contacts")
    match contacts[rank] if isinstance(contacts, list) and rank < len(contacts) else None:
        case {"store": str(store), "group": str(group)}:
            return {"store": store, "group": group}
    raise _unreadable(name)


def _unreadable(name: str) -> TransportError:
    return TransportError(f"worker {name} told something unreadable: install the same version of isthmus everywhere")
