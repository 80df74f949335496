"""The engine below an elastic world: it finds the workers; the rules, and the connections, are `elastic`'s."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from isthmus.core.types import UserError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.link_end import LinkEnd


@dataclass(frozen=True)
class Rendezvous:
    """The workers that found one another at one moment: all of them hold an equal one."""

    id: str  # unlike that of any other rendezvous of this run
    members: dict[str, MemberInfo]  # by worker name, in the order of the names


class Membership(Protocol):
    """Finds workers. It is the first rank of a worker that asks; `connect` and `leave` may come from any thread."""

    name: str  # this worker's: unique in the run, and the same again after a restart
    forgets_seconds: float  # after its last sign of life a worker still counts as alive for so long

    def connect(self, link: LinkEnd) -> None:
        """Reach the engine: from here on this worker counts as alive.

        The link is this rank's; `link.trust` signs what this worker tells, and says whom to believe. Where the engine
        cannot be reached, a `UserError` says who, for how long, and what to try.
        """

    def rendezvous(
        self, info: MemberInfo, wait_seconds: float, gives_up: Callable[[], bool] = lambda: False
    ) -> Rendezvous:
        """Tell `info` to the workers that come to the same rendezvous, and return theirs.

        Blocks until those that are alive have come, or the stragglers' grace is over. Ends at the latest after
        `wait_seconds`, and soon after `gives_up()` has become true. A worker beside which nobody else is alive is alone
        at its rendezvous.

        Raises:
            TransportError: it was given up, the engine failed or does not answer, or too few of those that are alive
                came (the real engines ask for a majority of them, so that a run is never split in two).
        """

    def rest(self) -> None:
        """Do not count as alive until the next rendezvous: this worker has to catch up before it can take part."""

    def leave(self) -> None:
        """Leave the run: the others do not wait for this worker any more. A second call does nothing."""


def check_grace(seconds: float) -> None:
    """Raise a `UserError` where a stragglers' grace is no number of seconds."""
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise UserError(f"grace_seconds is {seconds:g}: it should be a number of seconds, 0 for no grace at all")
