"""Who takes part in a sync, and how bytes move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.core.types import Peers


class TransportError(Exception):
    """A sync could not be carried out; the message says who or what failed."""


class PeerLost(TransportError):
    """Workers that did not answer within the sync budget. In a static world the run cannot go on."""

    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class Drift(TransportError):
    """Anchors that should be equal on all workers are not; the message names the workers that differ."""


class Stateful(Protocol):
    """Something whose whole state can be copied to a joining worker."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Become what `state_dict` describes."""
        ...


@dataclass(frozen=True)
class TransportLimits:
    """What a transport can and cannot do."""

    can_gather: bool = True
    max_in_flight: int = 64
    safe_to_overlap: bool = True  # False: collectives from a second thread may deadlock (NCCL)


class Transport(Protocol):
    """A world of workers. All calls but `now`, `join` and `leave` come from the one communication thread."""

    @property
    def limits(self) -> TransportLimits:
        """What this transport can and cannot do."""
        ...

    @property
    def num_workers(self) -> int:
        """Workers that a quorum formed now would have."""
        ...

    def join(self, replica: Stateful) -> None:
        """Connect; catch up with the others if the run is ahead of this worker."""
        ...

    def quorum(self, outer_step: int) -> Peers:
        """Agree on the workers of this sync."""
        ...

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote; True when the sync succeeded for everybody.

        A non-empty `fingerprint` (8 bytes of a hash of the anchors) must be equal on all peers with a
        positive weight, otherwise `Drift` is raised on all of them.
        """
        ...

    def leave(self) -> None:
        """Disconnect cleanly."""
        ...

    def now(self) -> float:
        """Seconds on this transport's clock: virtual in the simulator, where each thread of a worker has its own."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Tell the clock that the calling thread has waited for something that ended at `seconds`."""
        ...
