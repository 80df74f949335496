"""One worker's batches, out of what the ledger leases to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.base import Samples
from isthmus.data.ledger import MAX_DEMAND, Claim, Holding, Ledger, cut, join, length
from isthmus.inner.step import Batch


class LeasesExhausted(Exception):
    """Every sample leased to this worker is read: its round ends here, and only a commit can give it more."""


@dataclass(frozen=True)
class Rebase:
    """What became of the samples that were uncommitted before, counted from the oldest; the rest is uncommitted still.

    Attributes:
        landed: they are in the anchors, as whole captures. Do not send their pseudo-gradients again: perhaps another
            life of this worker sent them, which a record of contributors' names cannot tell.
        void: the whole pseudo-gradient must be dropped (local parameters = anchor): its samples are no longer leased to
            this worker, or a part of it that was never captured on its own is in the anchors.
    """

    landed: int = 0
    void: int = 0


class LeasedStream:
    """Batches from one worker's leases, read in order; a batch may join the ends of leases, shards and epochs.

    It holds the leases of one ledger: a newer one reaches it by `rebase` only. What it has read since the last commit
    is uncommitted. A new stream begins where the commits ended, so a worker that died and came back reads again what
    had died with it.

    A worker that has read all its leases must wait for a commit. Whatever else it read would be somebody else's, or
    would be read again; so ask for enough (`claim`), leases cost nothing: three rounds cover the round in flight,
    the next one, and one refused sync. Where even that is used up, the others have not committed for long, and
    drifting on alone is what the wait prevents.

    Args:
        samples: the line, equal on all workers.
        worker: this worker's name in the ledger.
        batch_size: samples of a batch; may differ between workers.
    """

    def __init__(self, samples: Samples, worker: str, batch_size: int) -> None:
        if batch_size < 1:
            raise UserError(f"data: batch_size is {batch_size}; choose at least 1")
        self.tokens_per_batch = batch_size * samples.tokens_per_sample
        self.samples = samples
        self.worker = worker
        self.batch_size = batch_size
        self._holding = Holding()  # as of the last rebase
        self._read = 0  # samples since the holding began, committed ones included
        self._captured: set[int] = set()  # what was read at each claim that may still be committed

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; raises `LeasesExhausted`, and takes nothing, where less than a batch is left."""
        if not self.batches_left:
            raise LeasesExhausted(f"{self.worker} has read all that is leased to it: sync before the next step")
        first = self.uncommitted
        parts = cut(self._holding.leases, first, first + self.batch_size)
        self._read += self.batch_size
        return self.samples.read(np.concatenate([np.arange(start, end) for start, end in parts]))

    @property
    def batches_left(self) -> int:
        """Whole batches that can be read before the next commit."""
        return (length(self._holding.leases) - self.uncommitted) // self.batch_size

    @property
    def uncommitted(self) -> int:
        """Samples read that are not committed, as far as the last `rebase` knew."""
        return self._read - self._holding.samples

    def claim(self, batches_ahead: int) -> dict[str, int]:
        """What to put into this worker's card, made when its pseudo-gradient is captured.

        It stays true while commits land and this worker reads on, so it may travel in a sync that overlaps.

        Args:
            batches_ahead: batches to have leased beyond this point; three rounds (see above).
        """
        self._captured.add(self._read)
        demand = min(batches_ahead * self.batch_size, MAX_DEMAND)
        return asdict(Claim(self._holding.since, self._read, demand))

    def rebase(self, ledger: Ledger) -> Rebase:
        """Go on from another ledger: after every commit, after a heal, at a resume.

        Raises:
            UserError: the ledger is of other data.
        """
        if ledger.corpus != self.samples.fingerprint:
            raise UserError(
                f"data: the run's samples are {ledger.corpus}, those of this worker {self.samples.fingerprint}: "
                "give all workers the same data, sequence_length and seed"
            )
        holding = ledger.holdings.get(self.worker, Holding())
        goes_on, uncommitted = self._goes_on_in(holding), self.uncommitted
        self._holding = holding
        if not goes_on:
            self.rewind()
            return Rebase(void=uncommitted)
        self._captured = {read for read in self._captured if read > holding.samples}
        return Rebase(landed=uncommitted - self.uncommitted)

    def rewind(self) -> None:
        """Forget what was read since the last commit: it is read again (after a pseudo-gradient was dropped)."""
        self._read, self._captured = self._holding.samples, set()

    def state_dict(self) -> dict[str, Any]:
        """The position and the leases it is a position in, as plain values."""
        return {
            "corpus": self.samples.fingerprint,
            "holding": asdict(self._holding) | {"leases": [list(lease) for lease in self._holding.leases]},
            "read": self._read,
            "captured": sorted(self._captured),
        }

    def state_as_of(self, ledger: Ledger, captured: Collection[int]) -> dict[str, Any]:
        """As `state_dict`, where what else is saved knows of an earlier commit than this stream.

        Args:
            ledger: of that commit.
            captured: what was read at each claim that is not committed in it.
        """
        earlier = LeasedStream(self.samples, self.worker, self.batch_size)
        earlier._holding = ledger.holdings.get(self.worker, Holding())
        earlier._read, earlier._captured = self._read, set(captured)
        return earlier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; refuses one in other data."""
        if state_dict["corpus"] != self.samples.fingerprint:
            raise UserError("data: the saved position belongs to other data; restore the data or start a new run")
        leases = tuple((start, end) for start, end in state_dict["holding"]["leases"])
        self._holding = Holding(**(state_dict["holding"] | {"leases": leases}))
        self._read, self._captured = state_dict["read"], set(state_dict["captured"])

    def _goes_on_in(self, holding: Holding) -> bool:
        """Whether what is uncommitted here is so there too, and only whole captures of this life were committed."""
        known = self._holding
        if holding.since != known.since or holding.samples not in {known.samples, *self._captured}:
            return False
        here = cut(known.leases, holding.samples - known.samples, self.uncommitted)
        return join(here) == join(cut(holding.leases, 0, self._read - holding.samples))
