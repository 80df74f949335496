"""The protocols that every transport fulfils, and its errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.core.types import Peers, State, WorkerGroup


class TransportError(Exception):
    """An error that says which worker, or what else, kept a sync from being carried out."""


class _OfRanks(TransportError):
    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks  # of the world, which are not the workers' numbers where those have several ranks


class PeerLost(_OfRanks):
    """Workers did not answer within the sync budget; a static world cannot go on."""


class RankLost(PeerLost):
    """A rank of this very worker is gone: the others end too, and the worker comes back as a whole."""


class Behind(TransportError):
    """The others have committed without this worker: it has to catch up before it can take part again."""


class Leaving(TransportError):
    """This worker leaves the run, and takes part in nothing any more."""


class Drift(_OfRanks):
    """Anchors that should be equal on all workers are not; it names the workers that differ from the majority."""


class Replica(Protocol):
    """Something whose shared state a joining worker can take over."""

    def shared_state(self, wait_seconds: float) -> State:
        """Return all that workers agree on, as plain values and tensors of its own; may be called from any thread."""


class ReplicatedState(Protocol):
    """State that moves only with a commit, such as the data ledger: equal on all workers after the same commits."""

    @property
    def samples_per_step(self) -> int:
        """The number of samples of one inner step of this worker."""

    def propose(self) -> Any:
        """Return a plain value that this worker wants committed with its next contribution; called at the capture."""

    def check(self, worker: str, proposal: Any) -> str:
        """Return why a worker's proposal cannot be committed, judged alike by all; empty where it can."""

    def gain(self, worker: str, proposal: Any) -> int:
        """Return the number of samples that committing a good proposal adds."""

    def commit(self, proposals: dict[str, Any], contributors: list[str]) -> None:
        """Commit the proposals of all workers of a sync, some of which contributed to its mean."""

    def apply(self) -> None:
        """Go by what was committed from here on: its sync is finished in this worker (on the training thread)."""

    def reconcile(self, contributed: bool) -> bool:
        """Return, after catching up, whether this worker's progress since its last commit still counts, or forget it.

        It has contributed where the others' state holds a sync that this worker still had in flight.
        """

    def roll_back(self) -> None:
        """Forget this worker's progress since its last commit."""

    def state_dict(self) -> State:
        """Return the state as plain values."""

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a saved or fetched state."""


@dataclass(frozen=True)
class TransportLimits:
    """The abilities of a transport."""

    safe_to_overlap: bool = True  # False: collectives from a second thread may deadlock (NCCL)
    elastic: bool = False  # workers may come and go; a sync that failed is tried again with those who are left
    ranks_per_worker: int = 1  # all of them join; `num_workers` and the ranks of `Peers` count workers


class ElasticPart(Protocol):
    """The part of a transport that only a world has whose workers come and go.

    All calls but `interrupt` come from the communication thread.
    """

    replicated_state: ReplicatedState | None  # what moves with the commits
    addresses: list[str]  # at which the others reach each rank of this worker

    @property
    def relative_speed(self) -> float:
        """This worker's share of the fastest one's speed, in (0, 1], as of the last commit."""

    def report_speed(self, steps_per_second: float) -> None:
        """Tell the others, at the next sync, how fast this worker trains."""

    def catch_up(self, max_bytes: int) -> State:
        """Return the shared state of those who are ahead, which may take `max_bytes`; only after `Behind`."""

    def contributed_to(self, outer_step: int) -> bool:
        """Return whether the others' state, after catching up, holds what this worker sent in that sync."""

    def wait_for_the_others(self) -> None:
        """Stay a while at the end of the run, for those who must still catch up with it."""

    def interrupt(self) -> None:
        """End a wait for others, from any thread: this worker is told to leave."""

    def state_dict(self) -> State:
        """Return what moves with every commit."""

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a saved or fetched state."""


class Transport(Protocol):
    """A world of workers. All calls but `now`, `join` and `leave` come from the one communication thread."""

    limits: TransportLimits
    num_workers: int  # that a quorum formed now would have
    worker_group: WorkerGroup  # this worker's own ranks

    @property
    def elastic(self) -> ElasticPart | None:
        """The part that only a world has whose workers come and go; None in a static world."""

    def join(self, replica: Replica) -> None:
        """Connect to the other workers, to which `replica` hands this worker's state when they have to catch up."""

    def quorum(self, outer_step: int, proposal: Any = None) -> Peers:
        """Agree on the workers of this sync.

        Args:
            outer_step: number of the sync.
            proposal: of this worker's replicated state, if it has one and the sync moves it.

        Raises:
            Behind: this worker has to catch up first (elastic worlds only).
        """

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote, and return whether all voted for the sync.

        A non-empty `fingerprint` (8 bytes of a hash of the anchors) must be equal on all peers with a
        positive weight, otherwise `Drift` is raised on all of them.
        """

    def leave(self) -> None:
        """Disconnect, and tell the others that this worker leaves."""

    def now(self) -> float:
        """Return the seconds on this transport's clock, which the simulator keeps for each thread of a worker."""

    def wait_until(self, seconds: float) -> None:
        """Tell the clock that the calling thread has waited for something that ended at `seconds`."""


def readable_message(error: Exception) -> str:
    """Return what people can read of a message of torch or gloo: no source path, no advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).split("\n")[0]).split(". ")[0]
