"""The data ledger as it moves with an elastic world's commits."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from isthmus.core import State
from isthmus.data.leased_batches import LeasedBatches, Rebase
from isthmus.data.ledger import Ledger
from isthmus.transport.base import ReplicatedState

_ROUNDS_AHEAD = 3  # the one in flight, the next, and one that is refused


class ReplicatedLedger(ReplicatedState):
    """The data ledger as replicated state: it moves on the communication thread, the batches on the training thread."""

    def __init__(self, leased: LeasedBatches, local_steps: int) -> None:
        self.leased = leased
        self.ledger = Ledger(leased.order.fingerprint)
        self._batches_ahead = _ROUNDS_AHEAD * local_steps  # H of them a round
        self._based_on = self.ledger

    @property
    @override
    def samples_per_step(self) -> int:
        return self.leased.batch_size

    @override
    def propose(self) -> dict[str, int]:
        """Propose to enter the samples that were read, and to lease as many as the next rounds take."""
        self._rebase()
        return self.leased.propose(self._batches_ahead)

    @override
    def check(self, worker: str, proposal: Any) -> str:
        return self.ledger.check(worker, proposal)

    @override
    def gain(self, worker: str, proposal: Any) -> int:
        return self.ledger.gain(worker, proposal)

    @override
    def commit(self, proposals: dict[str, Any], contributors: list[str]) -> None:
        self.ledger = self.ledger.commit(proposals, contributors)

    @override
    def apply(self) -> None:
        """Go by the ledger as it is now, when a sync that moved it is finished.

        Not earlier, though the ledger moves on the communication thread: all ranks of a worker must read the same
        samples.
        """
        self._rebase()

    @override
    def reconcile(self, contributed: bool) -> bool:
        """Return whether this worker's progress since its last commit still counts; forget it where it does not.

        It does not where others were given its samples meanwhile, or where some of it is in the others' state though
        this worker does not know which (it went on from an old checkpoint).
        """
        rebase = self._rebase()
        counts = rebase is None or (rebase.void == 0 and (rebase.committed == 0 or contributed))
        if not counts:
            self.leased.roll_back()
        return counts

    @override
    def roll_back(self) -> None:
        self.leased.roll_back()

    @override
    def state_dict(self) -> State:
        return self.ledger.state_dict()

    @override
    def load_state_dict(self, state_dict: State) -> None:
        self.ledger = Ledger.from_state_dict(state_dict)

    def _rebase(self) -> Rebase | None:
        if self.ledger is self._based_on:
            return None
        self._based_on = self.ledger
        return self.leased.rebase(self._based_on)
