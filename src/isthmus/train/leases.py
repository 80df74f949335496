"""The data ledger, as it moves with an elastic world's commits, and this worker's batches out of it."""

from __future__ import annotations

from typing import Any

from isthmus.core import State
from isthmus.data.leased_batches import LeasedBatches
from isthmus.data.ledger import Ledger
from isthmus.inner.step import Batch

_ROUNDS_AHEAD = 3  # the one in flight, the next, and one that is refused


class Leases:
    """The data ledger as replicated state: it moves on the communication thread, the stream on the training thread.

    Args:
        stream: this worker's.
        local_steps: H.
    """

    def __init__(self, stream: LeasedBatches, local_steps: int) -> None:
        self.stream = stream
        self.ledger = Ledger(stream.order.fingerprint)
        self._batches_ahead = _ROUNDS_AHEAD * local_steps
        self._based_on = self.ledger

    @property
    def tokens_per_batch(self) -> int:
        """Tokens a batch trains on."""
        return self.stream.tokens_per_batch

    @property
    def samples_per_step(self) -> int:
        """The batch size."""
        return self.stream.batch_size

    def __next__(self) -> Batch:
        """The next batch; raises `LeasesExhausted` where a commit has to come first."""
        return next(self.stream)

    def propose(self) -> dict[str, int]:
        """What was read, and what is wanted."""
        self._rebase()
        return self.stream.propose(self._batches_ahead)

    def check(self, worker: str, proposal: Any) -> str:
        """See `Ledger.check`."""
        return self.ledger.check(worker, proposal)

    def gain(self, worker: str, proposal: Any) -> int:
        """See `Ledger.gain`."""
        return self.ledger.gain(worker, proposal)

    def commit(self, proposals: dict[str, Any], contributors: list[str]) -> None:
        """See `Ledger.commit`."""
        self.ledger = self.ledger.commit(proposals, contributors)

    def apply(self) -> None:
        """Go by the ledger as it is now, when a sync that moved it is finished.

        Not earlier, though the ledger moves on the communication thread: all ranks of a worker must read the same
        samples.
        """
        self._rebase()

    def reconcile(self, contributed: bool) -> bool:
        """After catching up: whether this worker's progress since its last commit still counts; else it is forgotten.

        It does not where others were given its samples meanwhile, or where some of it is in the others' state though
        this worker does not know which (it went on from an old checkpoint).
        """
        verdict = self._rebase()
        counts = verdict is None or (verdict.void == 0 and (verdict.committed == 0 or contributed))
        if not counts:
            self.stream.roll_back()
        return counts

    def roll_back(self) -> None:
        """This worker's progress was dropped: read its samples again."""
        self.stream.roll_back()

    def state_dict(self) -> State:
        """The ledger."""
        return self.ledger.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Take over a ledger."""
        self.ledger = Ledger.from_state_dict(state_dict)

    def _rebase(self) -> Any:
        if self.ledger is self._based_on:
            return None
        self._based_on = self.ledger
        return self.stream.rebase(self._based_on)
