"""Lanes whose group has ended: both ends say goodbye on each, and then it is good for another group of the two links.

To connect takes several round trips, and a new connection does not know yet what the link bears. So of two members
that are alive neither closes a lane: it ends the frame that it is sending, says why the group ends, and says BYE; what
still comes is discarded until the BYE of the other one. Whoever would dial for their next group then sends HELLO over
the lanes instead.
"""

from __future__ import annotations

import fcntl
import json
import socket
import ssl
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

from typing_extensions import override

from isthmus.link.channel import Channel
from isthmus.link.errors import Misbehaviour
from isthmus.link.group import Member
from isthmus.link.handshake import Arrival, Greeted
from isthmus.link.lane import BEAT, BYE, DATA, HELLO, SCRATCH, Frame, Lane, Load, Traffic
from isthmus.link.poller import READ, WRITE, Poller

_SILENT_SECONDS, _LONGEST_SECONDS = 2.0, 5.0  # for the other end's goodbye: while nothing comes before it, and in all
_LATE_SECONDS = 1.0  # after the goodbye of the other end, which may not wait much longer for this one's
_KEPT_SECONDS = 600.0  # for another group
_TAKEN_SECONDS = 300.0  # the other end still keeps them then
_MAX_UNDELIVERED_BYTES = 1 << 16  # on a lane that is taken: the other end is about to hear the goodbye
_LOOK_SECONDS = 0.005
_ASK_SECONDS = 0.5  # to hand the network a hello for each lane


class Draining(Traffic):
    """What one lane still sends, and what it reads: anything until the goodbye, from both goodbyes on a hello."""

    def __init__(self, last_words: Iterable[tuple[Frame, memoryview]]) -> None:
        self._frames = deque([*last_words, (Frame(BYE, 0), memoryview(b""))])
        self.has_said = self.has_heard = self.is_clean = False  # the goodbye; the last: both
        self.has_asked = False  # the hello has been sent
        self.hello = b""  # that has come

    def ask(self, hello: bytes) -> None:
        """Send a hello."""
        self._frames.append((Frame(HELLO, len(hello)), memoryview(hello)))

    @override
    def next_frame(self, load: Load) -> tuple[Frame, memoryview] | None:
        return self._frames.popleft() if self._frames else None

    @override
    def written(self, frame: Frame) -> None:
        self.has_said = self.has_said or frame.kind == BYE
        self.has_asked = self.has_asked or frame.kind == HELLO

    @override
    def place(self, frame: Frame) -> memoryview | None:
        if frame.kind not in ((HELLO,) if self.is_clean else (BEAT, DATA, BYE)):
            raise Misbehaviour(f"it sent a frame of kind {frame.kind} between two groups")
        return memoryview(bytearray(frame.num_bytes)) if frame.kind == HELLO else SCRATCH[: frame.num_bytes]

    @override
    def read(self, frame: Frame, payload: memoryview) -> None:
        self.has_heard = self.has_heard or frame.kind == BYE
        self.hello = bytes(payload) if frame.kind == HELLO else b""


@dataclass(eq=False)
class _PooledLanes:
    """All lanes to one peer that a group has had."""

    member: Member
    drainings: dict[Lane, Draining]  # in the order of the lanes
    began_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)  # when more of a large message came
    clean_at: float | None = None  # when all goodbyes had been said and heard
    is_taken = False  # a hello has come, or is sent
    is_unwanted = False
    is_connected = False  # the other end has been told for which group they are now
    is_over = False

    def is_old(self, seconds: float) -> bool:
        """Return whether the lanes have been good for another group for so long."""
        return self.clean_at is not None and time.monotonic() > self.clean_at + seconds


class LanePool:
    """The lanes of a link that belong to no group now, a former group's for each peer.

    All methods but `take` want the lock of the link.

    Args:
        poller: of the link.
        changed: of the link.
        end: closes a lane once the other end has had a moment to read what was sent last.
        greet: looks after connections whose other end has sent a hello over each.
    """

    def __init__(
        self, poller: Poller, changed: Condition, end: Callable[[Lane], None], greet: Callable[[Greeted], None]
    ) -> None:
        self._poller, self._changed, self._end, self._greet = poller, changed, end, greet
        self._sets: dict[str, _PooledLanes] = {}  # by the id of the other link

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def num_clean(self) -> int:
        """The number of peers the lanes to which are good for another group."""
        return sum(found.clean_at is not None for found in self._sets.values())

    def add(self, member: Member, channel: Channel) -> None:
        """Say goodbye on all lanes of a group that has ended."""
        now, former = time.monotonic(), self._sets.get(member.id)
        heard_at = min((lane.ended_at for lane in channel.lanes if lane.has_ended), default=now)
        if now > heard_at + _LATE_SECONDS or (former is not None and former.is_taken):
            for lane in channel.lanes:
                self._end(lane)
            return
        if former is not None:
            self._give_up(former)
        words = channel.last_words()
        found = _PooledLanes(member, {lane: Draining(words if lane.load == "small" else []) for lane in channel.lanes})
        self._sets[member.id] = found
        for lane, draining in found.drainings.items():
            draining.has_heard = lane.has_ended
            lane.turn_to(draining)
            self._poller.unwatch(lane.connection)
        for lane in found.drainings:
            self._serve(found, lane, READ | WRITE)

    def take(self, member: Member, group: str, rank: int, seconds: float) -> list[Arrival]:
        """Return the lanes to a peer for another group; none where there are none, or not within so many seconds.

        The caller trusts its key. Once this is sure that the other end knows of the goodbyes, that one is told for
        which group the lanes are now.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            found = self._sets.get(member.id)
            if found is None or found.member.fingerprint != member.fingerprint or found.is_old(_TAKEN_SECONDS):
                return []
            while not found.is_over and not found.is_taken and not _is_delivered(found):
                if time.monotonic() > deadline:
                    found.is_unwanted = True
                    self._poller.wake()
                    return []
                self._changed.wait(_LOOK_SECONDS)
            if found.is_over or found.is_taken or not all(map(_is_quiet, found.drainings)):
                return []
            self._ask(found, group, rank)
            self._changed.wait_for(lambda: found.is_over, _ASK_SECONDS)
            found.is_unwanted = not found.is_over
            self._poller.wake()
            lanes = enumerate(found.drainings) if found.is_connected else []
            return [Arrival(each.connection, member.fingerprint, lane, len(found.drainings)) for lane, each in lanes]

    def keep_only(self, link_ids: Container[str]) -> None:
        """Close the lanes to all other links."""
        for found in self._sets.values():
            found.is_unwanted = found.is_unwanted or found.member.id not in link_ids
        self._poller.wake()

    def look(self, is_closing: bool) -> None:
        """Close what has waited for too long, or where the link closes everything."""
        now = time.monotonic()
        for found in list(self._sets.values()):
            latest = min(found.heard_at + _SILENT_SECONDS, found.began_at + _LONGEST_SECONDS)
            is_late = found.clean_at is None and now > latest
            if is_closing or found.is_unwanted or is_late or found.is_old(_KEPT_SECONDS):
                self._give_up(found)

    def _ask(self, found: _PooledLanes, group: str, rank: int) -> None:
        found.is_taken = True
        for number, (lane, draining) in enumerate(list(found.drainings.items())):
            purpose = {"group": group, "rank": rank, "lane": number, "num_lanes": len(found.drainings)}
            draining.ask(json.dumps({"to": found.member.id, **purpose}).encode())
            lane.has_ended = True  # what comes from now on is for the group
            self._poller.serve_soon(lane.connection, partial(self._serve, found, lane))
        self._poller.wake()

    def _serve(self, found: _PooledLanes, lane: Lane, events: int) -> None:
        """Do what a lane can do now."""
        if found.is_over:
            return
        draining, again = found.drainings[lane], partial(self._serve, found, lane)
        if events & READ and lane.load != "small":  # whose heartbeats go on where the other end keeps the group
            found.heard_at = time.monotonic()
        try:
            self._poller.serve(lane, events, again)
            if draining.has_said and draining.has_heard and not draining.is_clean:
                draining.is_clean, lane.has_ended = True, False
                self._poller.serve(lane, READ, again)
        except (OSError, Misbehaviour):
            self._give_up(found)
        else:
            self._look_at(found)

    def _look_at(self, found: _PooledLanes) -> None:
        """See whether all lanes are clean now, or as one for another group."""
        drainings = found.drainings.values()
        if found.clean_at is None and all(each.is_clean for each in drainings):
            found.clean_at = time.monotonic()
            self._changed.notify_all()
        found.is_taken = found.is_taken or any(each.hello for each in drainings)
        is_connected, is_greeted = all(each.has_asked for each in drainings), all(each.hello for each in drainings)
        if is_connected or is_greeted:
            self._leave(found)
            found.is_connected = is_connected
            if is_greeted:
                self._greet([(lane.connection, draining.hello) for lane, draining in found.drainings.items()])

    def _give_up(self, found: _PooledLanes) -> None:
        self._leave(found)
        for lane, draining in found.drainings.items():
            if draining.is_clean:
                lane.connection.close()
            else:
                self._end(lane)

    def _leave(self, found: _PooledLanes) -> None:
        del self._sets[found.member.id]
        found.is_over = True
        for lane in found.drainings:
            self._poller.unwatch(lane.connection)
        self._changed.notify_all()


def _is_delivered(found: _PooledLanes) -> bool:
    """Return whether all goodbyes have been said and heard here, and the other end hears this one's now."""
    return found.clean_at is not None and all(
        _undelivered_bytes(lane.connection) < _MAX_UNDELIVERED_BYTES for lane in found.drainings
    )


def _is_quiet(lane: Lane) -> bool:
    """Return whether nothing has come, read or not: no part of a hello, and no end, behind which nobody reads one."""
    try:
        socket.socket.recv(lane.connection, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return lane.is_between_frames
    except OSError:
        pass
    return False


def _undelivered_bytes(connection: ssl.SSLSocket) -> int:
    """Return how many bytes the other end has not acknowledged; 0 where the system does not tell."""
    with suppress(OSError):
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        return int(num_bytes)
    return 0
