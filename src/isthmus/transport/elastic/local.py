"""An elastic world in one process: workers are threads that meet, die and come back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from isthmus.transport.base import TransportError
from isthmus.transport.elastic.membership import Card, Meeting
from isthmus.transport.local import Local, LocalWorld
from isthmus.transport.peers import BufferPeers


class MeetingPlace:
    """Where `LocalMembership`s meet.

    Args:
        grace_seconds: how long those who have come wait for the others that are alive, once they are the majority.
    """

    def __init__(self, grace_seconds: float = 0.2) -> None:
        self.grace_seconds = grace_seconds
        self.alive: set[str] = set()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._cards: dict[str, Card] = {}  # of those who wait
        self._first_came = 0.0
        self._meeting: Meeting | None = None
        self._groups: dict[str, tuple[LocalWorld, list[str]]] = {}

    def connect(self, name: str) -> None:
        """`name` is alive from here on."""
        with self._changed:
            self.alive.add(name)

    def kill(self, name: str) -> None:
        """`name` is gone: whoever waits for it is told."""
        with self._changed:
            self.alive.discard(name)
            self._cards.pop(name, None)
            self._give_up(name, "is gone")
            self._changed.notify_all()

    def meet(self, name: str, card: Card, wait_seconds: float) -> Meeting:
        """See `Membership.meet`."""
        with self._changed:
            self._give_up(name, "has gone on")
            if not self._cards:
                self._first_came = time.monotonic()
            self._cards[name] = card
            end = time.monotonic() + wait_seconds
            while True:
                self.check_alive(name)
                if self._meeting is not None and self._meeting.cards.get(name) is card:
                    return self._meeting
                now = time.monotonic()
                if self._complete(now) or now >= end:
                    cards = dict(sorted(self._cards.items()))
                    self._meeting, self._cards = Meeting(f"meeting-{next(self._numbers)}", cards), {}
                    self._changed.notify_all()
                    return self._meeting
                self._changed.wait(min(end, self._first_came + self.grace_seconds) - now + 0.001)

    def group(self, meeting: Meeting, names: list[str], weights: list[float]) -> LocalWorld:
        """The world of those who were chosen at a meeting."""
        with self._changed:
            world, _ = self._groups.setdefault(meeting.id, (LocalWorld(len(names), weights=weights), names))
            for name in set(names) - self.alive:
                world.kill(names.index(name))
            return world

    def check_alive(self, name: str) -> None:
        """Raise `TransportError` when this worker is gone."""
        if name not in self.alive:
            raise TransportError(f"{name} is gone")

    def _give_up(self, name: str, reason: str) -> None:
        """Whoever still waits for this worker after an earlier meeting waits in vain."""
        for world, names in self._groups.values():
            if name in names:
                world.kill(names.index(name), reason)

    def _complete(self, now: float) -> bool:
        all_here = self.alive <= self._cards.keys()
        return all_here or (2 * len(self._cards) > len(self.alive) and now >= self._first_came + self.grace_seconds)


class LocalMembership:
    """One worker's `Membership` at a `MeetingPlace`.

    Args:
        place: where all meet.
        name: of this worker.
        disturb: called with "meet", "group" and "leave" when these are about to happen; may raise.
    """

    def __init__(self, place: MeetingPlace, name: str, disturb: Callable[[str], None] = lambda point: None) -> None:
        self.place, self.name, self._disturb = place, name, disturb

    contact = None

    def connect(self) -> None:
        """Count as alive."""
        self.place.connect(self.name)

    def meet(self, card: Card, wait_seconds: float) -> Meeting:
        """See `Membership.meet`."""
        self._disturb("meet")
        return self.place.meet(self.name, card, wait_seconds)

    def gather_around(self, meeting: Meeting, names: list[str], weights: list[float]) -> BufferPeers:
        """See `Membership.gather_around`."""
        self._disturb("group")
        return Local(self.place.group(meeting, names, weights), names.index(self.name)).quorum(0)

    def part(self) -> None:
        """The next meeting ends it."""

    def leave(self) -> None:
        """Gone for good, or killed."""
        self.place.kill(self.name)
