"""An elastic world in one process: workers are threads that find one another, die and come back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.link_end import LinkEnd


class LocalRendezvousServer:
    """The place where `LocalMembership`s find one another.

    Args:
        grace_seconds: how long those who have come wait for the others that are alive, once they are the majority.
    """

    def __init__(self, grace_seconds: float = 0.2) -> None:
        self.grace_seconds = grace_seconds
        self.alive: set[str] = set()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: dict[str, MemberInfo] = {}
        self._first_came = 0.0
        self._last: Rendezvous | None = None

    def connect(self, name: str) -> None:
        """Count a worker as alive from here on."""
        with self._changed:
            self.alive.add(name)

    def kill(self, name: str) -> None:
        """Count a worker as gone: whoever waits for it is told."""
        with self._changed:
            self.alive.discard(name)
            self._waiting.pop(name, None)
            self._changed.notify_all()

    def rendezvous(
        self, name: str, info: MemberInfo, wait_seconds: float, gives_up: Callable[[], bool] = lambda: False
    ) -> Rendezvous:
        """Wait for the other workers; see `Membership.rendezvous`."""
        info = dict(info)  # it comes with an equal one again where not all could connect
        with self._changed:
            if not self._waiting:
                self._first_came = time.monotonic()
            self._waiting[name] = info
            end = time.monotonic() + wait_seconds
            while True:
                self.check_alive(name)
                if gives_up():
                    self._waiting.pop(name, None)
                    raise TransportError("given up")
                if self._last is not None and self._last.members.get(name) is info:
                    return self._last
                now = time.monotonic()
                if self._is_complete(now) or now >= end:
                    members = dict(sorted(self._waiting.items()))
                    self._last, self._waiting = Rendezvous(f"rendezvous-{next(self._numbers)}", members), {}
                    self._changed.notify_all()
                    return self._last
                self._changed.wait(min(0.1, min(end, self._first_came + self.grace_seconds) - now + 0.001))

    def check_alive(self, name: str) -> None:
        """Raise `TransportError` when a worker is gone."""
        if name not in self.alive:
            raise TransportError(f"{name} is gone")

    def _is_complete(self, now: float) -> bool:
        is_majority = 2 * len(self._waiting) > len(self.alive)
        return self.alive <= self._waiting.keys() or (is_majority and now >= self._first_came + self.grace_seconds)


class LocalMembership(Membership):
    """One worker's `Membership` by way of a `LocalRendezvousServer`.

    Args:
        server: by which all find one another.
        name: of this worker.
        disturb: called with "rendezvous" when one is about to happen; may raise.
    """

    forgets_seconds = 0.0

    def __init__(
        self, server: LocalRendezvousServer, name: str, disturb: Callable[[str], None] = lambda point: None
    ) -> None:
        self.server, self.name, self._disturb = server, name, disturb

    @override
    def connect(self, link: LinkEnd) -> None:
        self.server.connect(self.name)

    @override
    def rendezvous(
        self, info: MemberInfo, wait_seconds: float, gives_up: Callable[[], bool] = lambda: False
    ) -> Rendezvous:
        self._disturb("rendezvous")
        return self.server.rendezvous(self.name, info, wait_seconds, gives_up)

    @override
    def rest(self) -> None:
        pass  # the others wait for the grace

    @override
    def leave(self) -> None:
        self.server.kill(self.name)
