"""The way to another link: directly, or because one of the two has registered at the other, or both at a third."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from isthmus.link.greeting import HANDSHAKE_SECONDS, introduce, keep_alive
from isthmus.link.group import Member
from isthmus.link.registrations import Registrations
from isthmus.link.relay import Relay

REGISTER = "register"  # the service of a link where others register
_FIRST_TURN_SECONDS, _LONGEST_TURN_SECONDS = 1.0, 8.0  # of the direct way, and of the others
_PAUSE_SECONDS = 0.2
_CALL_BACK_SECONDS = 2.0  # for who has registered here to come


class Reach:
    """How one link reaches others. Which way has worked is remembered, so that it is tried first the next time.

    Args:
        own_id: of this link.
        relay: of this link.
        contexts: return what TLS needs to connect with members, and with relays.
        admit: see `Registrations`.
        via: the address of a relay where this link is always registered.
        beat_seconds, patience_seconds: see `Control`.
    """

    def __init__(
        self,
        own_id: str,
        relay: Relay,
        contexts: tuple[Callable[[], ssl.SSLContext], Callable[[], ssl.SSLContext]],
        admit: Callable[[socket.socket, str], None],
        via: tuple[str, int] | None,
        beat_seconds: float,
        patience_seconds: float,
    ) -> None:
        self._own_id, self._relay, self._via = own_id, relay, via
        self._context, self._relay_context = contexts
        self._registrations = Registrations(own_id, self._register, admit, beat_seconds, patience_seconds)
        self._known: dict[str, Member] = {}  # by the id of the link
        self._failing_since: dict[str, float] = {}  # by the same: whoever was found was not the member
        self._is_direct: dict[str, bool] = {}  # by the same: whether the way that has worked is the direct one
        self._registrations.add(self._relays_of([]))

    def meet(self, members: Iterable[Member]) -> None:
        """Take note of those who take part now; those before them are forgotten."""
        self._known = {member.id: member for member in members if member.id != self._own_id}
        self._is_direct = {link_id: way for link_id, way in self._is_direct.items() if link_id in self._known}
        self._registrations.drop_all_but(self._relays_of(self._known.values()))

    def seek(self, members: Iterable[Member]) -> None:
        """Register at all who take part, and at these members, and at their relays, as far as they can be reached."""
        self.register_at([*self._known.values(), *members])

    def register_at(self, members: Iterable[Member]) -> None:
        """Register at these members, and at their relays, as far as they can be reached."""
        self._registrations.add(self._relays_of({each for each in members if each.id not in ("", self._own_id)}))

    def connect(self, member: Member, deadline: float) -> tuple[socket.socket, float]:
        """Return a TCP connection that leads to a member's link, and about the seconds of a round trip.

        The direct way and the others are tried in turns, which grow longer.

        Raises:
            OSError: there is no way, or none was found in time.
        """
        turn_seconds = min(_FIRST_TURN_SECONDS, (deadline - time.monotonic()) / 3)
        found = None if self._is_direct.get(member.id) else self._call_back(member, deadline)
        if found is None and self._is_direct.get(member.id) is False:
            found = self._registrations.call(member, deadline)
        while found is None:
            try:
                found = self._connect_directly(member, min(turn_seconds, deadline - time.monotonic()))
                self._is_direct[member.id] = True
            except OSError:
                self.seek([member])
                found = self._ask_until(member, min(time.monotonic() + turn_seconds, deadline))
                if found is None and time.monotonic() >= deadline:
                    raise
                turn_seconds = min(_LONGEST_TURN_SECONDS, 2 * turn_seconds)
        return found

    @contextmanager
    def judging(self, member: Member) -> Iterator[None]:
        """Try another way the next time where this one has led for a while to nobody who is the member."""
        try:
            yield
        except OSError:
            now = time.monotonic()
            if now > self._failing_since.setdefault(member.id, now) + _FIRST_TURN_SECONDS:
                del self._failing_since[member.id]
                self._is_direct[member.id] = not self._is_direct.get(member.id)
                self.seek([member])
            raise
        self._failing_since.pop(member.id, None)

    def close(self) -> None:
        """End all registrations of this link."""
        self._registrations.close()

    def _connect_directly(self, member: Member, seconds: float) -> tuple[socket.socket, float]:
        begin = time.monotonic()
        connection = socket.create_connection(member.address, max(0.01, seconds))
        keep_alive(connection)
        return connection, time.monotonic() - begin

    def _call_back(self, member: Member, deadline: float) -> tuple[socket.socket, float] | None:
        """Have a member come that has registered here."""
        begin = time.monotonic()
        connection = self._relay.call_back(member.id, min(_CALL_BACK_SECONDS, deadline - begin))
        return None if connection is None else (connection, (time.monotonic() - begin) / 2)  # it takes two round trips

    def _ask_until(self, member: Member, deadline: float) -> tuple[socket.socket, float] | None:
        """Return the connection of a member that has registered, or registers in time, here or where this link has."""
        while time.monotonic() < deadline:
            if (found := self._call_back(member, deadline)) is not None:
                return found
            if (found := self._registrations.call(member, deadline)) is not None:
                self._is_direct[member.id] = False
                return found
            self._relay.wait_for(member.id, min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
        return None

    def _register(self, relay: Member) -> ssl.SSLSocket:
        """Open the connection to a relay by which this link is registered there."""
        connection = socket.create_connection(relay.address, HANDSHAKE_SECONDS)
        keep_alive(connection)
        context = self._context() if relay.fingerprint else self._relay_context()
        return introduce(connection, relay, context, {"service": REGISTER})

    def _relays_of(self, members: Collection[Member]) -> set[Member]:
        """Return where this link registers to reach members, and to be reached by them."""
        places = {Member(0, "", member.address, member.fingerprint, member.id) for member in members}
        addresses = {member.via for member in members} | {self._via}
        return places | {
            Member(0, f"the relay at {address[0]}, port {address[1]},", address, "")
            for address in addresses
            if address is not None
        }
