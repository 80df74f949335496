"""The engine below an elastic world: it finds the workers and connects them for one sync; the rules are `elastic`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.core.types import UserError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.peers import BufferPeers


@dataclass(frozen=True)
class Rendezvous:
    """The workers that found one another at one moment: all of them hold an equal one."""

    id: str  # unlike that of any other rendezvous of this run
    members: dict[str, MemberInfo]  # by worker name, in the order of the names


class Membership(Protocol):
    """Finds workers and connects them. All calls but `connect` and `leave` come from the one communication thread."""

    name: str  # this worker's: unique in the run, and the same again after a restart

    @property
    def contact(self) -> Any:
        """The way to reach this rank, in the engine's own terms: a plain JSON value for its worker's info."""

    def connect(self, link: LinkEnd) -> None:
        """Reach the engine: from here on this worker counts as alive, if this is its first rank.

        The link is this rank's; `info["links"]` says where those of all ranks of a worker are. Where the engine cannot
        be reached, a `UserError` says who, for how long, and what to try.
        """

    def rendezvous(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        """Tell `info` to the workers that come to the same rendezvous, and return theirs.

        Blocks until those that are alive have come, or the stragglers' grace is over. Ends at the latest after
        `wait_seconds`. A worker beside which nobody else is alive is alone at its rendezvous.

        Raises:
            TransportError: the engine failed or does not answer, or too few of those that are alive came (the real
                engines ask for a majority of them, so that a run is never split in two).
        """

    def connect_peers(self, rendezvous: Rendezvous, names: list[str], weights: list[float]) -> BufferPeers:
        """Connect the workers `names` of a rendezvous, this one among them, in rank order; all of them call it alike.

        Where they have several ranks, each connects with those of the same rank in the other workers: the first ranks
        were at the rendezvous, the others were told of it.

        Every collective of the result raises `TransportError`, naming who is missing, within seconds of a death and
        within the sync budget in any case, and leaves nothing behind that would disturb the next rendezvous.
        """

    def disconnect_peers(self) -> None:
        """Leave the peers that this rank has connected with: they need not wait for it."""

    def leave(self) -> None:
        """Leave the run: the others do not wait for this worker any more. A second call does nothing."""


def check_grace(seconds: float) -> None:
    """Raise a `UserError` where a stragglers' grace is no number of seconds."""
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise UserError(f"grace_seconds is {seconds:g}: it should be a number of seconds, 0 for no grace at all")
