"""One end of the link: a port at which the others are let in, and a thread that moves the bytes of all groups."""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from isthmus.link.channel import Channel
from isthmus.link.errors import MemberLost, Misbehaviour
from isthmus.link.greeting import introduce
from isthmus.link.group import Group, Member
from isthmus.link.handshake import Arrival, Welcome, dial
from isthmus.link.identity import Identity
from isthmus.link.lane import Lane, Load
from isthmus.link.lane_pool import LanePool
from isthmus.link.poller import READ, WRITE, Poller
from isthmus.link.reach import REGISTER, Reach
from isthmus.link.relay import Relay

_CLOSE_SECONDS = 1.0  # for the others to read why, and to close
_LEAVE_SECONDS = 3.0  # for members that reach one another through this link to finish what this one has finished
_SOON_SECONDS = 1.5  # whoever has not come by then may not be able to reach this link
_TAKE_SECONDS = 1.0  # for the lanes of a former group; then new ones are opened
_TICKS_A_CONTROL_BEAT = 4


class Link:
    """This process's end of the link.

    Args:
        identity: of this worker.
        trusted: returns the fingerprints of those who are let in; asked whenever a connection is made.
        host: address of this machine to listen on.
        port: 0 takes a free one.
        tick_seconds: between two heartbeats, and between two looks at those of the others.
        patience_seconds: how long a member may be silent.
        via: the address of another link, with whose help this one can be reached although its port cannot.
        trusted_relays: returns the fingerprints of links that may help; None: of those who are let in.

    Attributes:
        id: of this link, unlike any other.

    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(
        self,
        identity: Identity,
        trusted: Callable[[], Iterable[str]],
        host: str = "127.0.0.1",
        port: int = 0,
        tick_seconds: float = 0.5,
        patience_seconds: float = 10.0,
        via: tuple[str, int] | None = None,
        trusted_relays: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.identity, self.id, self.via = identity, secrets.token_hex(16), via
        self._trusted = trusted
        self._tick_seconds = tick_seconds
        self._patience_ticks = max(2, round(patience_seconds / tick_seconds))
        self._changed = threading.Condition()
        self._groups: list[Group] = []
        self._closing: dict[ssl.SSLSocket, float] = {}  # and until when
        self._poller = Poller(self._look_at_all)
        self._closed = self._stopped = False  # `close` was called; the thread has nothing more to do
        control = _TICKS_A_CONTROL_BEAT * tick_seconds, patience_seconds
        self._relay = Relay(*control)
        self._welcome = Welcome(host, port, partial(identity.tls_context, server=True), trusted, self.id, self._relay)
        self._welcome.services[REGISTER] = self._relay.serve
        self._pool = LanePool(self._poller, self._changed, self._end, self._welcome.greet_again)
        contexts = self._context, partial(self._context, trusted_relays or trusted)
        self._reach = Reach(self.id, self._relay, contexts, self._welcome.admit, via, *control)
        self.address = (host, self._welcome.port)
        self._thread = threading.Thread(target=self._run, name="isthmus-link", daemon=True)
        self._thread.start()

    def open(self, name: str, members: Sequence[Member], rank: int, seconds: float) -> Group:
        """Connect with all members of a group, who do the same.

        Args:
            name: of the group; no other one of these members has had it.
            members: in rank order.
            rank: of this one.
            seconds: how long it may take.

        Raises:
            MemberLost: somebody did not come.
        """
        deadline = time.monotonic() + seconds
        channels = {r: Channel(member.name, self._changed.notify_all) for r, member in enumerate(members) if r != rank}
        group = Group(
            name, members, rank, channels, self._changed, self._poller.wake, self._tick_seconds, self._patience_ticks
        )
        arrivals = self._gather(name, members, rank, deadline)
        missing = [r for r in channels if not arrivals[r]]
        if missing:
            for found in arrivals.values():
                for arrival in found:
                    arrival.connection.close()
            names = ", ".join(members[r].name for r in missing)
            raise MemberLost([members[r].number for r in missing], f"no connection to {names} within {seconds:g} s")
        with self._changed:
            if self._stopped:
                raise MemberLost([], "this worker has left")
            for r, found in arrivals.items():
                loads: list[Load] = ["nothing", "bulk"] if r < rank else ["bulk", "nothing"]  # who dialled has the odd
                channels[r].lanes = [
                    Lane(each.connection, channels[r], loads[each.lane % 2] if each.lane else "small") for each in found
                ]
                for lane in channels[r].lanes:  # the other end may have sent something before
                    self._poller.serve_soon(lane.connection, partial(self._serve, group, r, lane))
            self._groups.append(group)
            self._poller.wake()
        return group

    def serve(self, service: str, handler: Callable[[ssl.SSLSocket], None]) -> None:
        """Have a handler, on a thread of its own, look after every connection that a trusted worker opens to a service.

        It closes the connection in the end.
        """
        self._welcome.services[service] = handler

    def call(self, member: Member, service: str, seconds: float) -> ssl.SSLSocket:
        """Return a connection to a service of a member.

        Raises:
            OSError: it does not answer within so many seconds, or does not let this worker in.
        """
        connection, _ = self._reach.connect(member, time.monotonic() + seconds)
        with self._reach.judging(member):
            return introduce(connection, member, self._context(), {"service": service})

    def meet(self, members: Iterable[Member]) -> None:
        """Take note of those who take part from here on: they help one another to be reached."""
        members = list(members)
        self._reach.meet(members)
        with self._changed:
            self._pool.keep_only({member.id for member in members})

    def register_at(self, members: Iterable[Member]) -> None:
        """Keep a connection open with members, as far as they can be reached: they reach this link in any case."""
        self._reach.register_at(members)

    def close(self) -> None:
        """Leave all groups, and end. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups)
        for group in groups:
            group.close()
        self._reach.close()
        self._relay.close(_LEAVE_SECONDS if groups else 0.0)
        self._welcome.close()
        self._stopped = True
        self._poller.wake()
        self._thread.join()

    def _gather(self, name: str, members: Sequence[Member], rank: int, deadline: float) -> dict[int, list[Arrival]]:
        """Return the connections with all other members, empty where one did not come in time.

        Of two, the later one dials, where they have no lanes of a former group. Whoever waits for it in vain registers
        there, to be asked to come.
        """
        arrivals: dict[int, list[Arrival]] = {}
        trusted = list(self._trusted())
        with self._changed:  # groups that have ended leave their lanes
            self._changed.wait_for(lambda: not any(map(_has_ended, self._groups)), _CLOSE_SECONDS)

        def connect(r: int) -> None:
            seconds = min(_TAKE_SECONDS, (deadline - time.monotonic()) / 4)
            lanes = self._pool.take(members[r], name, rank, seconds) if members[r].fingerprint in trusted else []
            context = self.identity.tls_context(trusted, server=False)
            arrivals[r] = lanes or dial(members[r], self._reach, context, name, rank, deadline)

        threads = [threading.Thread(target=connect, args=[r], daemon=True) for r in range(rank)]
        for thread in threads:
            thread.start()
        soon = time.monotonic() + min(_SOON_SECONDS, (deadline - time.monotonic()) / 4)
        for until in (soon, deadline):
            for r in range(rank + 1, len(members)):
                arrivals[r] = arrivals.get(r) or self._welcome.wait_for(name, r, members[r].fingerprint, until)
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            if not all(arrivals.get(r) for r in range(len(members)) if r != rank):
                self._reach.seek(members)
        for thread in threads:
            thread.join()
        return arrivals

    def _context(self, trusted: Callable[[], Iterable[str]] | None = None) -> ssl.SSLContext:
        """Return what TLS needs to connect with whoever is trusted."""
        return self.identity.tls_context((trusted or self._trusted)(), server=False)

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._stopped or self._groups or self._closing or self._pool:
            ready = self._poller.wait(next_tick - time.monotonic())
            with self._changed:
                for serve in ready:
                    serve()
                self._poller.serve_unread()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + self._tick_seconds
                    self._tick()
        self._poller.close()

    def _look_at_all(self) -> None:
        """Look at all lanes: something is to be sent, was asked for, or has ended."""
        for group in list(self._groups):
            if not _has_ended(group):
                for rank, channel in group.channels.items():
                    for lane in channel.lanes:
                        if not lane.broken:
                            self._serve(group, rank, lane, WRITE | (READ if lane.is_parked else 0))
            if _has_ended(group):
                self._let_go(group)
        self._pool.look(self._closed)

    def _serve(self, group: Group, rank: int, lane: Lane, events: int) -> None:
        """Do what a lane can do now."""
        if _has_ended(group) or group not in self._groups:
            return
        try:
            self._poller.serve(lane, events, partial(self._serve, group, rank, lane))
        except Misbehaviour as error:
            group.blame(rank, str(error))
            return
        except OSError as error:
            self._poller.unwatch(lane.connection)
            lane.broken = str(error)  # the other lanes may still bring what was sent before, and why
        if lane.broken or lane.has_ended:
            group.note_end(rank)

    def _let_go(self, group: Group) -> None:
        """Keep the lanes of a group for the next one; close those to members that are lost."""
        self._groups.remove(group)
        for rank, channel in group.channels.items():
            if group.may_meet_again(rank) and not self._closed:
                self._pool.add(group.members[rank], channel)
            else:
                for lane in channel.lanes:
                    self._end(lane)
            channel.lanes = []
        self._changed.notify_all()

    def _end(self, lane: Lane) -> None:
        """Close a lane, once the other end has had a moment to read what was sent last."""
        self._poller.unwatch(lane.connection)
        self._closing[lane.connection] = time.monotonic() + _CLOSE_SECONDS
        try:
            lane.write_last()
            self._poller.watch(lane.connection, READ, partial(self._drain, lane.connection))
        except OSError:  # the other end has left before
            self._close(lane.connection)

    def _drain(self, connection: ssl.SSLSocket, events: int) -> None:
        """Read what nobody wants any more, so that the others get what was sent last; then close."""
        with suppress(OSError):
            if connection.recv(1 << 16):
                return
        self._close(connection)

    def _close(self, connection: ssl.SSLSocket) -> None:
        del self._closing[connection]
        self._poller.unwatch(connection)
        connection.close()

    def _tick(self) -> None:
        for group in self._groups:
            if group.lost is None:  # else a heartbeat would take the place of what the others were told last
                group.tell()
                group.judge()
        self._look_at_all()
        for connection, until in list(self._closing.items()):
            if self._stopped or time.monotonic() > until:
                self._close(connection)


def _has_ended(group: Group) -> bool:
    return group.lost is not None or group.left
