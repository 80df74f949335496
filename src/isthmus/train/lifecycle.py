"""How a worker gets its batches, begins, stops and comes back: with all others, or in an elastic world alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from isthmus.config import RunConfig
from isthmus.core import State, UserError
from isthmus.data import DataSet, LeasedBatches, Ledger, open_batches
from isthmus.data.base import Batches
from isthmus.data.leased_batches import Rebase
from isthmus.train.metrics import whole_lines
from isthmus.train.process import Process
from isthmus.train.resume_check import MissingCheckpoints, has_checkpoints, newest_common, no_checkpoint
from isthmus.train.stopping import Stopping
from isthmus.transport import Transport
from isthmus.transport.base import ReplicatedState
from isthmus.transport.configured import ConfiguredTransport
from isthmus.transport.elastic.worker_ranks import worker_name
from isthmus.transport.shared_notes import Notes, OwnNotes

_LOGGER = logging.getLogger(__name__)
_ROUNDS_AHEAD = 3  # that are leased: the one in flight, the next, and one that is refused


class Lifecycle:
    """A worker of a static world, where all begin, stop and come back together."""

    def __init__(self, config: RunConfig, process: Process, data_set: DataSet) -> None:
        self._config, self._process, self._rank = config, process, process.world_rank
        self.batches = self._open_batches(data_set)
        self.transport_options: dict[str, Any] = {}  # which the configuration does not hold

    def batches_state(self, method_state: State) -> State:
        """Return the position in the batches that belongs to a saved state of the method."""
        return dict(self.batches.state_dict())

    def choose_checkpoint(self, usable_steps: list[int], transport: Transport) -> int | None:
        """Return the step to go on from, of those whose checkpoint this rank can use; None begins anew."""
        step = newest_common(usable_steps, transport)
        if step is None:
            raise no_checkpoint(Path(self._config.train.run_dir))
        return step

    def kept_metrics_bytes(self, path: Path, saved_bytes: int) -> int:
        """Return how much of a metrics file is kept when the run goes on from a checkpoint that counted so many."""
        return saved_bytes

    def begin(self, save: Callable[[], None] | None, transport: Transport) -> None:
        """Make ready for the first step of a run; `save` writes a first checkpoint, where checkpoints are wanted."""
        if save:
            save()
            transport.commit(transport.quorum(0), True)  # all have tried: killed at any step, the run can go on

    def missing_checkpoints(self, transport: Transport) -> MissingCheckpoints:
        """Return the steps whose checkpoint some worker could not write; to be called by all ranks."""
        return MissingCheckpoints(self._open_notes(transport))

    def stopping(self, transport: Transport) -> Stopping:
        """Return the agreement about the last step; to be called by all ranks."""
        budget_seconds, elastic = self._config.outer.transport["sync_budget_seconds"], transport.elastic
        interrupt = elastic.interrupt if elastic is not None else lambda: None
        return Stopping(self._open_notes(transport), self._rank, self._process.world_size, budget_seconds, interrupt)

    def how_to_resume(self, step: int) -> str:
        """Return the line that says how a stopped run goes on; empty where another process writes it."""
        how = f"isthmus train {self._config.train.run_dir}/config.yaml --resume"
        return f"stopped after step {step}; go on with: {how}" if self._process.world_rank == 0 else ""

    def _open_batches(self, data_set: DataSet) -> Batches:
        train, batch_size = self._config.train, self._config.inner.batch_size
        return open_batches(data_set, train.seed, batch_size, self._process.worker, train.workers)

    def _open_notes(self, transport: Transport) -> Notes:
        return OwnNotes() if self._process.world_size == 1 else cast(ConfiguredTransport, transport).open_notes()


class ElasticLifecycle(Lifecycle):
    """A worker of an elastic world: it may come late, leave early and come back, while the others go on.

    Its batches are leased by the data ledger, its checkpoints are its own. The world of its process is this worker.
    """

    batches: LeasedBatches

    def __init__(self, config: RunConfig, process: Process, data_set: DataSet) -> None:
        if config.outer.schedule is None:
            raise UserError(f"{config.outer.recipe} has no outer loop: it needs outer.transport.type torch_dist")
        super().__init__(config, process, data_set)
        self._rank = process.rank
        ledger = ReplicatedLedger(self.batches, config.outer.schedule.local_steps)
        resumes = has_checkpoints(Path(config.train.run_dir), process.worker)
        self.transport_options = {"replicated_state": ledger, "resumes": resumes}

    @override
    def batches_state(self, method_state: State) -> State:
        """Return the position in this worker's leases as the method's state knows them: a sync may be ahead of it."""
        ledger = Ledger.from_state_dict(method_state["elastic"]["replicated_state"])
        proposals = [sync["proposal"] for sync in method_state["in_flight"] if sync["proposal"]]
        return self.batches.state_as_of(ledger, [proposal["samples"] for proposal in proposals])

    @override
    def choose_checkpoint(self, usable_steps: list[int], transport: Transport) -> int | None:
        """Return the newest step of which every rank of this worker holds a checkpoint."""
        lists = transport.worker_group.all_gather_object(usable_steps)
        step = max(set[int].intersection(*map(set, lists)), default=None)
        if step is None and self._process.is_first_rank:
            _LOGGER.warning(
                "%s holds no checkpoint of this worker: it begins at step 0, or catches up with the others",
                self._config.train.run_dir,
            )
        return step

    @override
    def kept_metrics_bytes(self, path: Path, saved_bytes: int) -> int:
        return whole_lines(path)  # the others went on: nothing is cut

    @override
    def begin(self, save: Callable[[], None] | None, transport: Transport) -> None:
        pass

    @override
    def missing_checkpoints(self, transport: Transport) -> MissingCheckpoints:
        return MissingCheckpoints(OwnNotes())  # the other workers go on from their own

    @override
    def how_to_resume(self, step: int) -> str:
        if not self._process.is_first_rank:
            return ""
        worker, size = self._process.worker, self._process.world_size
        program = f"torchrun --standalone --nproc-per-node {size} -m isthmus" if size > 1 else "isthmus"
        command = f"ISTHMUS_WORKER={worker} {program} train {self._config.train.run_dir}/config.yaml --resume"
        return f"left after step {step}; come back with: {command}"

    @override
    def _open_batches(self, data_set: DataSet) -> LeasedBatches:
        name = worker_name(self._process.mesh.num_ranks)
        return LeasedBatches(data_set.sample_order(self._config.train.seed), name, self._config.inner.batch_size)


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
