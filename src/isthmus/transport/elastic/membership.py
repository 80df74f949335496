"""The engine below an elastic world: it finds who is there and joins them for one sync; the rules are `elastic`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.core.types import UserError
from isthmus.transport.peers import BufferPeers

Card = dict[str, Any]  # what a worker says of itself: plain JSON values, at most a few kilobytes


@dataclass(frozen=True)
class Meeting:
    """Workers that met: all of them hold an equal one."""

    id: str  # unlike that of any other meeting of this run
    cards: dict[str, Card]  # by worker name, in the order of the names


class Membership(Protocol):
    """Finds workers and connects them. All calls but `connect` and `leave` come from the one communication thread."""

    @property
    def name(self) -> str:
        """This worker's name: unique in the run, and the same again after a restart."""
        ...

    @property
    def contact(self) -> Any:
        """Where this rank can be reached, in the engine's own terms: a plain JSON value for its worker's card."""
        ...

    def connect(self) -> None:
        """Reach the engine: from here on this worker counts as alive, if this is its first rank.

        Raises:
            UserError: it cannot be reached; the message says who, for how long, and what to try.
        """
        ...

    def meet(self, card: Card, wait_seconds: float) -> Meeting:
        """Show `card` to whoever meets now, and see theirs.

        Blocks until those that are alive have come, or the stragglers' grace is over. Ends at the latest after
        `wait_seconds`. A worker beside which nobody else is alive meets alone.

        Raises:
            TransportError: the engine failed or does not answer, or too few of those that are alive came (the real
                engines ask for a majority of them, so that a run is never split in two).
        """
        ...

    def gather_around(self, meeting: Meeting, names: list[str], weights: list[float]) -> BufferPeers:
        """Connect the workers `names` of a meeting, this one among them; all of them call it alike.

        Where they have several ranks, each connects with those at its own place: the first ranks have met, the others
        were told of it.

        Every collective of the result raises `TransportError`, naming who is missing, within seconds of a death and
        within the sync budget in any case, and leaves nothing behind that would disturb the next meeting.

        Args:
            meeting: where they met.
            names: those who take part, in rank order.
            weights: each one's share, summing to 1.
        """
        ...

    def part(self) -> None:
        """Leave those around whom this rank has gathered: they need not wait for it."""
        ...

    def leave(self) -> None:
        """Say goodbye: the others do not wait for this worker any more. A second call does nothing."""
        ...


def check_grace(seconds: float) -> None:
    """Refuse a stragglers' grace that is none.

    Raises:
        UserError: it is negative, infinite or not a number.
    """
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise UserError(f"grace_seconds is {seconds:g}: it should be a number of seconds, 0 for no grace at all")
