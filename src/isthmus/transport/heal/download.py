"""The progress that a joiner's threads share while they fetch a state: which donor offers what, what is missing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from isthmus.transport.base import TransportError
from isthmus.transport.heal.snapshot import Incoming, Manifest


class Download:
    """The progress of one state from all its donors. Its fields change under its lock only.

    Args:
        donors: their names, the most trusted first.
        patience_seconds: after which a chunk asked of one donor is asked also of one that has nothing else to do.
        deadline: for everything, on `time.monotonic()`.
    """

    def __init__(self, donors: list[str], patience_seconds: float, deadline: float) -> None:
        self.patience_seconds, self.deadline = patience_seconds, deadline
        self.chunks: Counter[str] = Counter()  # how many came from each donor
        self.dropped: dict[str, str] = {}  # donors that failed, and why
        self.ended = False
        self._donors = donors
        self._offers: dict[str, Manifest] = {}
        self._incoming: Incoming | None = None
        self._missing: dict[int, None] = {}  # an ordered set
        self._asked_at: dict[int, float] = {}
        self._changed = threading.Condition()

    def patience(self) -> float:
        """Return the seconds that one call on a connection may wait; raise `TimeoutError` where none are left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return min(self.patience_seconds, left)

    def elect(self) -> Manifest:
        """Wait for the donors' manifests; return the majority's, which there must be for each state."""
        with self._changed:
            while True:
                offers = [self._offers[donor] for donor in self._donors if donor in self._offers]
                votes = Counter((offer.id, offer.digest) for offer in offers)
                if votes and max(votes.values()) > len(self._donors) / 2:
                    break
                if len(self._offers.keys() | self.dropped.keys()) == len(self._donors):
                    break
                self._wait()
            if not offers:
                raise self._failure("no donor is left")
            _check_agreement(offers)
            winner = votes.most_common(1)[0][0]  # the first donor's, in a tie
            return next(offer for offer in offers if (offer.id, offer.digest) == winner)

    def receive(self, incoming: Incoming) -> None:
        """Have the donors fill `incoming`; return when it is complete, and raise where that cannot be."""
        with self._changed:
            self._incoming = incoming
            self._missing = dict.fromkeys(range(len(incoming.manifest.chunks)))
            self._changed.notify_all()
            while self._missing or self._asked_at:
                if len(self.dropped) == len(self._donors):
                    raise self._failure("no donor is left")
                self._wait()

    def end(self) -> None:
        """End the download: from here on nothing changes."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def drop(self, donor: str, reason: str) -> None:
        """Go on without a donor, for a reason."""
        with self._changed:
            if not self.ended:
                self.dropped[donor] = "".join(char if char.isprintable() else " " for char in reason[:300])
                self._changed.notify_all()

    def offer(self, donor: str, manifest: Manifest) -> Incoming | None:
        """Tell what a donor promises, and wait until one is believed: this one, or it is refused; None if too late."""
        with self._changed:
            self._offers[donor] = manifest
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._incoming is not None or self.ended)
            if self.ended or self._incoming is None:
                return None
            believed = self._incoming.manifest
            if manifest.id != believed.id:
                raise TransportError(f"its state is {manifest.id}, not {believed.id}")
            if manifest.digest != believed.digest:
                raise TransportError(f"its state {manifest.id} differs from the majority's")
            return self._incoming

    def reserve(self, wait: bool) -> int | None:
        """Return a chunk to ask a donor for; None when nothing is left to do, with `wait` only when everything is here.

        A chunk that another donor was asked for long ago is asked again: nothing may depend on the slowest.
        """
        with self._changed:
            while not self.ended and (self._missing or (wait and self._asked_at)):
                now = time.monotonic()
                if self._missing:
                    index = next(iter(self._missing))
                    del self._missing[index]
                else:
                    index = min(self._asked_at, key=self._asked_at.__getitem__)
                    overdue_in = self._asked_at[index] + self.patience_seconds - now
                    if overdue_in > 0:
                        self._changed.wait(overdue_in)
                        continue
                self._asked_at[index] = now
                return index
            return None

    def give_back(self, indices: Iterable[int]) -> None:
        """Give chunks back that a donor was asked for in vain."""
        with self._changed:
            for index in indices:
                if self._asked_at.pop(index, None) is not None:
                    self._missing[index] = None
            self._changed.notify_all()

    def put(self, donor: str, index: int, data: memoryview) -> None:
        """Store a chunk that a donor has sent, and that has been checked."""
        with self._changed:
            wanted = index in self._asked_at or index in self._missing  # not here yet from another donor
            if wanted and self._incoming is not None and not self.ended:
                self._incoming.write(index, data)
                self.chunks[donor] += 1
                self._asked_at.pop(index, None)
                self._missing.pop(index, None)
                self._changed.notify_all()

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._failure("the time is up")
        self._changed.wait(left)

    def _failure(self, reason: str) -> TransportError:
        told = [f"{donor}: {self.dropped.get(donor, 'not finished')}" for donor in self._donors]
        return TransportError(f"the state could not be fetched, {reason} ({'; '.join(told) or 'none was named'})")


def _check_agreement(offers: list[Manifest]) -> None:
    for name in {offer.id for offer in offers}:
        votes = Counter(offer.digest for offer in offers if offer.id == name).most_common(2)
        if len(votes) == 2 and votes[0][1] == votes[1][1]:
            raise TransportError(f"the donors disagree about state {name}, and none of its forms has a majority")
