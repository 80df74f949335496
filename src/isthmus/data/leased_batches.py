"""One worker's batches, out of what the ledger leases to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.base import SampleOrder, check_batch_size, check_position
from isthmus.data.ledger import MAX_DEMAND, Ledger, Proposal, WorkerLeases, cut, join, length
from isthmus.inner.step import Batch


class LeasesExhausted(Exception):
    """Every sample leased to this worker is read: its round ends here, and only a commit can give it more."""


@dataclass(frozen=True)
class Rebase:
    """The fate of the samples that were uncommitted before, counted from the oldest; the rest is uncommitted still.

    Attributes:
        committed: they are in the anchors, as whole captures. Do not send their pseudo-gradients again: perhaps another
            life of this worker sent them, which a record of contributors' names cannot tell.
        void: the whole pseudo-gradient must be dropped (local parameters = anchor): its samples are no longer leased to
            this worker, or a part of it that was never captured on its own is in the anchors.
    """

    committed: int = 0
    void: int = 0


class LeasedBatches:
    """Batches from one worker's leases, read in order; a batch may join the ends of leases, shards and epochs.

    It holds the leases of one ledger: a newer one reaches it by `rebase` only. What it has read since the last commit
    is uncommitted. New batches begin where the commits ended, so a worker that died and came back reads again what
    had died with it.

    A worker that has read all its leases must wait for a commit. Whatever else it read would be somebody else's, or
    would be read again; so ask for enough (`propose`), leases cost nothing: three rounds cover the round in flight,
    the next one, and one refused sync. Where even that is used up, the others have not committed for long, and
    drifting on alone is what the wait prevents.

    Args:
        order: the order of the samples, equal on all workers.
        worker: this worker's name in the ledger.
        batch_size: samples of a batch; may differ between workers.
    """

    def __init__(self, order: SampleOrder, worker: str, batch_size: int) -> None:
        check_batch_size(batch_size, order.num_samples)
        self.tokens_per_batch = batch_size * order.tokens_per_sample
        self.order, self.worker, self.batch_size = order, worker, batch_size
        self._leases = WorkerLeases()  # as of the last rebase
        self._read = 0  # samples since its first lease began, committed ones included
        self._captured: set[int] = set()  # what was read at each proposal that may still be committed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise `LeasesExhausted`, and take nothing, where less than a batch is left."""
        if not self.batches_left:
            raise LeasesExhausted(f"{self.worker} has read all that is leased to it: sync before the next step")
        first = self.uncommitted
        parts = cut(self._leases.leases, first, first + self.batch_size)
        self._read += self.batch_size
        return self.order.read(np.concatenate([np.arange(start, end) for start, end in parts]))

    @property
    def batches_left(self) -> int:
        """The whole batches that can be read before the next commit."""
        return (length(self._leases.leases) - self.uncommitted) // self.batch_size

    @property
    def uncommitted(self) -> int:
        """The samples read that are not committed, as far as the last `rebase` knew."""
        return self._read - self._leases.samples

    def propose(self, batches_ahead: int) -> dict[str, int]:
        """Return what this worker proposes to commit, made when its pseudo-gradient is captured.

        It stays true while commits land and this worker reads on, so it may travel in a sync that overlaps.

        Args:
            batches_ahead: batches to have leased beyond this point; three rounds (see above).
        """
        self._captured.add(self._read)
        demand = min(batches_ahead * self.batch_size, MAX_DEMAND)
        return asdict(Proposal(self._leases.since, self._read, demand))

    def rebase(self, ledger: Ledger) -> Rebase:
        """Go on from another ledger: after every commit, after a heal, at a resume.

        Raises:
            UserError: the ledger is of other data.
        """
        if ledger.data_fingerprint != self.order.fingerprint:
            raise UserError(
                f"data: the run's samples are {ledger.data_fingerprint}, this worker's are {self.order.fingerprint}: "
                "give all workers the same data, sequence_length and seed"
            )
        leased = ledger.workers.get(self.worker, WorkerLeases())
        goes_on, uncommitted = self._goes_on_in(leased), self.uncommitted
        self._leases = leased
        if not goes_on:
            self.roll_back()
            return Rebase(void=uncommitted)
        self._captured = {read for read in self._captured if read > leased.samples}
        return Rebase(committed=uncommitted - self.uncommitted)

    def roll_back(self) -> None:
        """Forget what was read since the last commit: it is read again (after a pseudo-gradient was dropped)."""
        self._read, self._captured = self._leases.samples, set()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the leases it is a position in, as plain values."""
        return {
            "corpus": self.order.fingerprint,
            "holding": asdict(self._leases) | {"leases": [list(lease) for lease in self._leases.leases]},
            "read": self._read,
            "captured": sorted(self._captured),
        }

    def state_as_of(self, ledger: Ledger, captured: Collection[int]) -> dict[str, Any]:
        """Return the `state_dict` that fits an earlier commit, where what else is saved knows of no later one.

        Args:
            ledger: of that commit.
            captured: what was read at each proposal that is not committed in it.
        """
        earlier = LeasedBatches(self.order, self.worker, self.batch_size)
        earlier._leases = ledger.workers.get(self.worker, WorkerLeases())
        earlier._read, earlier._captured = self._read, set(captured)
        return earlier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; refuses one in other data."""
        check_position(state_dict["corpus"], self.order.fingerprint)
        leases = tuple((start, end) for start, end in state_dict["holding"]["leases"])
        self._leases = WorkerLeases(**(state_dict["holding"] | {"leases": leases}))
        self._read, self._captured = state_dict["read"], set(state_dict["captured"])

    def _goes_on_in(self, leased: WorkerLeases) -> bool:
        """Tell whether what is uncommitted here is so there too, and whole captures of this life were committed."""
        known = self._leases
        if leased.since != known.since or leased.samples not in {known.samples, *self._captured}:
            return False
        here = cut(known.leases, leased.samples - known.samples, self.uncommitted)
        return join(here) == join(cut(leased.leases, 0, self._read - leased.samples))
