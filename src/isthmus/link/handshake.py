"""How two members of a group connect: one dials, the other lets in whoever holds a key that it trusts."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

from isthmus.core.types import UserError
from isthmus.link.greeting import HANDSHAKE_SECONDS, WELCOME, end, introduce, keep_alive, read
from isthmus.link.group import Member
from isthmus.link.identity import fingerprint_of
from isthmus.link.lane import HEADER_BYTES, HELLO, MAX_CONTROL_BYTES, MAX_LANES, Frame, num_bulk_lanes, prepare
from isthmus.link.reach import Reach
from isthmus.link.relay import ANSWER, CALL, TOKEN_BYTES, Relay

_MAX_NEWCOMERS = 64  # connections whose handshake is not done; one more, and the oldest of the busiest address goes
_MAX_ARRIVALS = 512  # connections for groups that this worker has not opened
_KEPT_SECONDS = 60.0  # an arrival for a group that this worker has not opened
_RETRY_SECONDS = 0.1
_TRUST_SECONDS, _TRUST_LOOK_SECONDS = 2.0, 0.01  # for this link to be told that a former member is back

Result = TypeVar("Result")
Greeted = list[tuple[ssl.SSLSocket, bytes]]  # connections, and the hello that came over each


class Arrival(NamedTuple):
    """A connection that is ready to become a lane."""

    connection: ssl.SSLSocket
    fingerprint: str
    lane: int  # of `num_lanes`, the first of which is for small messages
    num_lanes: int


def dial(
    member: Member, reach: Reach, context: ssl.SSLContext, group: str, rank: int, deadline: float
) -> list[Arrival]:
    """Return connections to a member, as many as the way is long; none where it cannot be reached in time.

    It may not know yet that this worker is trusted, so whoever is turned away tries again.
    """

    def connect() -> tuple[socket.socket, float]:
        return reach.connect(member, deadline)

    connected = _until(deadline, connect)
    if connected is None:
        return []
    spare, round_trip_seconds = [connected[0]], connected[1]
    num_lanes = 1 + 2 * num_bulk_lanes(round_trip_seconds)

    def open_lane(lane: int) -> Arrival:
        connection = spare.pop() if lane == 0 and spare else connect()[0]
        purpose = {"group": group, "rank": rank, "lane": lane, "num_lanes": num_lanes}
        with reach.judging(member):
            secure = introduce(connection, member, context, purpose)
        prepare(secure)
        return Arrival(secure, member.fingerprint, lane, num_lanes)

    with ThreadPoolExecutor(num_lanes, "isthmus-dial") as pool:
        found = pool.map(lambda lane: _until(deadline, lambda: open_lane(lane)), range(num_lanes))
    arrivals = [arrival for arrival in found if arrival is not None]
    if len(arrivals) == num_lanes:
        return arrivals
    for arrival in arrivals:
        arrival.connection.close()
    return []


class Welcome:
    """The port of a link: whoever connects has a few seconds to show a trusted key and to say what it comes for."""

    def __init__(
        self,
        host: str,
        port: int,
        context: Callable[[Iterable[str]], ssl.SSLContext],
        trusted: Callable[[], Iterable[str]],
        link_id: str,
        relay: Relay,
    ) -> None:
        self._link_id, self._relay = link_id, relay
        self.services: dict[str, Callable[[ssl.SSLSocket], None]] = {}  # each ends with the connection
        self._context, self._trusted = context, trusted
        self._changed = threading.Condition()
        self._arrivals: dict[tuple[str, int], dict[int, Arrival]] = defaultdict(dict)  # by lane
        self._came_at: dict[tuple[str, int], float] = {}
        self._newcomers: dict[socket.socket, str] = {}  # and their addresses, oldest first
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(f"{host} is no address of this machine ({error.strerror})") from error
            raise UserError(f"{host}, port {port}, cannot be listened on: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="isthmus-welcome", daemon=True)
        self._thread.start()

    def wait_for(self, group: str, rank: int, fingerprint: str, deadline: float) -> list[Arrival]:
        """Return all connections of a member of a group; none where it did not come in time."""
        key = (group, rank)
        with self._changed:
            while True:
                found = [each for each in self._arrivals.get(key, {}).values() if each.fingerprint == fingerprint]
                if found and len(found) == found[0].num_lanes:
                    del self._arrivals[key], self._came_at[key]
                    return sorted(found, key=lambda arrival: arrival.lane)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    return []

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._changed:
            for connection in list(self._newcomers):
                end(connection)
            for arrivals in self._arrivals.values():
                for arrival in arrivals.values():
                    arrival.connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)  # too many open files
                continue
            self.admit(connection, address)

    def admit(self, connection: socket.socket, address: str) -> None:
        """Give a connection a few seconds to show a trusted key, wherever it comes from."""
        with self._changed:
            if self._listener.fileno() < 0:
                connection.close()
                return
            self._make_room()
            self._newcomers[connection] = address
        threading.Thread(target=self._let_in, args=[connection], name="isthmus-hello", daemon=True).start()

    def greet_again(self, greeted: Greeted) -> None:
        """Let in the other end of lanes that another group had: they are for a new group of the two."""
        threading.Thread(target=self._let_in_again, args=[greeted], name="isthmus-hello", daemon=True).start()

    def _let_in_again(self, greeted: Greeted) -> None:
        try:
            hellos = [_parse_hello(payload, self._link_id) for _, payload in greeted]
            groups = [hello for hello in hellos if not isinstance(hello, str)]
            is_one_group = {(*each[:2], each[3]) for each in groups} == {(*groups[0][:2], len(greeted))}
            is_whole = {lane for _, _, lane, _ in groups} == set(range(len(greeted)))
            if not is_one_group or not is_whole or not self._will_trust(fingerprint_of(greeted[0][0])):
                raise ValueError("not all lanes of one group, or not trusted any more")
        except (OSError, ValueError, IndexError):
            for connection, _ in greeted:
                connection.close()
            return
        for (connection, _), hello in zip(greeted, groups, strict=True):
            self._note_arrival(connection, *hello)

    def _will_trust(self, fingerprint: str) -> bool:
        """Return whether a former member is trusted, or will be within a while."""
        deadline = time.monotonic() + _TRUST_SECONDS  # it may have heard first that they meet again, and asks once
        while fingerprint not in set(self._trusted()):
            if time.monotonic() > deadline or self._listener.fileno() < 0:
                return False
            time.sleep(_TRUST_LOOK_SECONDS)
        return True

    def _make_room(self) -> None:
        """End the oldest handshake of the address that has most of them, where there are too many."""
        if len(self._newcomers) >= _MAX_NEWCOMERS:
            addresses = list(self._newcomers.values())
            busiest = max(addresses, key=addresses.count)
            oldest = next(each for each, address in self._newcomers.items() if address == busiest)
            del self._newcomers[oldest]
            end(oldest)

    def _let_in(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            keep_alive(connection)
            if connection.recv(1, socket.MSG_PEEK) in (CALL, ANSWER):
                self._let_meet(connection)
                return
            context = self._context(self._trusted())
            with self._changed:
                address = self._newcomers.pop(connection)
                connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                self._newcomers[connection] = address
            connection.do_handshake()
            hello = _read_hello(connection, self._link_id)
            connection.sendall(WELCOME)
        except (OSError, ValueError, KeyError):  # nobody who is trusted, one that gave up, or that had to make room
            connection.close()
            return
        finally:
            with self._changed:
                self._newcomers.pop(connection, None)
        if isinstance(hello, str):
            self.services.get(hello, ssl.SSLSocket.close)(connection)
        else:
            self._note_arrival(connection, *hello)

    def _let_meet(self, connection: socket.socket) -> None:
        """Hand a connection to the relay, which knows by its token for whom it is."""
        preface = read(connection, 1 + TOKEN_BYTES)
        with self._changed:
            del self._newcomers[connection]
        self._relay.arrive(preface, connection)

    def _note_arrival(self, connection: ssl.SSLSocket, group: str, rank: int, lane: int, num_lanes: int) -> None:
        prepare(connection)
        with self._changed:
            if self._listener.fileno() < 0:
                connection.close()
                return
            self._sweep()
            former = self._arrivals[group, rank].get(lane)
            if former is not None:
                former.connection.close()
            self._arrivals[group, rank][lane] = Arrival(connection, fingerprint_of(connection), lane, num_lanes)
            self._came_at[group, rank] = time.monotonic()
            self._make_room_for_arrivals()
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Close what came for a group that was never opened here."""
        for key, came_at in list(self._came_at.items()):
            if time.monotonic() > came_at + _KEPT_SECONDS:
                self._forget(key)

    def _make_room_for_arrivals(self) -> None:
        """Close the oldest of whoever has most connections for groups that this link has not opened, if too many."""
        numbers = Counter(each.fingerprint for found in self._arrivals.values() for each in found.values())
        if sum(numbers.values()) > _MAX_ARRIVALS:
            ((busiest, _),) = numbers.most_common(1)
            keys = [
                key for key, found in self._arrivals.items() if any(e.fingerprint == busiest for e in found.values())
            ]
            self._forget(min(keys, key=self._came_at.__getitem__))

    def _forget(self, key: tuple[str, int]) -> None:
        del self._came_at[key]
        for arrival in self._arrivals.pop(key).values():
            arrival.connection.close()


def _until(deadline: float, attempt: Callable[[], Result]) -> Result | None:
    """Try until it succeeds; None when the time is over."""
    while time.monotonic() < deadline:
        with suppress(OSError):
            return attempt()
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    return None


def _read_hello(connection: socket.socket, own_id: str) -> str | tuple[str, int, int, int]:
    """Return the name of a service, or group, rank, lane and number of lanes; `ValueError` where it is neither."""
    frame = Frame.unpack(read(connection, HEADER_BYTES))
    if frame.kind != HELLO or frame.num_bytes > MAX_CONTROL_BYTES:
        raise ValueError("no hello")
    return _parse_hello(read(connection, frame.num_bytes), own_id)


def _parse_hello(payload: bytes, own_id: str) -> str | tuple[str, int, int, int]:
    match json.loads(payload):
        case {"to": str(to)} if to not in ("", own_id):
            raise ValueError("it looks for another link, of which it thinks that it is here")
        case {"service": str(service)}:
            return service
        case {"group": str(group), "rank": int(rank), "lane": int(lane), "num_lanes": int(num_lanes)}:
            if 0 <= lane < num_lanes <= 1 + 2 * MAX_LANES:
                return group, rank, lane, num_lanes
    raise ValueError("no hello")
