"""A worker of an elastic world: it may come late, leave early and come back, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from isthmus.config import RunConfig
from isthmus.core import State, UserError
from isthmus.data import DataSet, LeasedBatches, Ledger
from isthmus.train.common_checkpoints import MissingCheckpoints
from isthmus.train.lifecycle import Lifecycle
from isthmus.train.metrics import whole_lines
from isthmus.train.process import Process
from isthmus.train.replicated_ledger import ReplicatedLedger
from isthmus.train.stopping import Stopping
from isthmus.transport import Transport
from isthmus.transport.elastic.worker_ranks import worker_name
from isthmus.transport.rendezvous import open_store


class ElasticLifecycle(Lifecycle):
    """Batches leased by the data ledger; this worker's own checkpoints; it leaves alone.

    Args:
        config: of the run.
        process: this one; its world is this worker.
        data_set: opened.

    Raises:
        UserError: the method has no outer loop.
    """

    def __init__(self, config: RunConfig, process: Process, data_set: DataSet) -> None:
        if config.outer.schedule is None:
            raise UserError(f"{config.outer.recipe} has no outer loop: it needs outer.transport.type torch_dist")
        self._config, self._process = config, process
        order, name = data_set.sample_order(config.train.seed), worker_name(process.mesh.num_ranks)
        leased = LeasedBatches(order, name, config.inner.batch_size)
        self.batches = ReplicatedLedger(leased, config.outer.schedule.local_steps)
        self.transport_options: dict[str, Any] = {"replicated_state": self.batches}

    @override
    def batches_state(self, method_state: State) -> State:
        """Return the position in this worker's leases as the method's state knows them: a sync may be ahead of it."""
        ledger = Ledger.from_state_dict(method_state["elastic"]["replicated_state"])
        proposals = [sync["proposal"] for sync in method_state["in_flight"] if sync["proposal"]]
        return self.batches.leased.state_as_of(ledger, [proposal["samples"] for proposal in proposals])

    @override
    def load_batches_state(self, state: State) -> None:
        self.batches.leased.load_state_dict(state)

    @override
    def choose_checkpoint(self, usable_steps: list[int], transport: Transport) -> int | None:
        """Return the newest step of which every rank of this worker holds a checkpoint."""
        lists = [usable_steps]
        if self._process.world_size > 1:
            lists = [[]] * self._process.world_size
            dist.all_gather_object(lists, usable_steps)
        return max(set[int].intersection(*map(set, lists)), default=None)

    @override
    def has_caught_up(self, method_state: State) -> bool:
        return bool(method_state["elastic"]["version"] > 0)

    @override
    def kept_metrics_bytes(self, path: Path, saved_bytes: int) -> int:
        return whole_lines(path)  # the others went on: nothing is cut

    @override
    def begin(self, save: Callable[[], None] | None, transport: Transport) -> None:
        pass

    @override
    def missing_checkpoints(self) -> MissingCheckpoints:
        return MissingCheckpoints(HashStore())  # the other workers go on from their own

    @override
    def stopping(self, transport: Transport) -> Stopping:
        assert transport.elastic is not None
        size, budget_seconds = self._process.world_size, self._config.outer.transport["sync_budget_seconds"]
        store = HashStore() if size == 1 else open_store()[0]
        return Stopping(store, self._process.rank, size, budget_seconds, transport.elastic.interrupt)

    @override
    def how_to_resume(self, step: int) -> str:
        if not self._process.is_first_rank:
            return ""
        worker, size = self._process.worker, self._process.world_size
        torchrun = f"ISTHMUS_WORKER={worker} torchrun --standalone --nproc-per-node {size} -m isthmus"
        program = torchrun if size > 1 else f"RANK={worker} isthmus"
        return (
            f"left after step {step}; come back with: {program} train {self._config.train.run_dir}/config.yaml --resume"
        )
