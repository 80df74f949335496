"""A worker of a static world: all workers begin, stop and come back together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from typing_extensions import override

from isthmus.config import RunConfig
from isthmus.core import State
from isthmus.data import DataSet, open_batches
from isthmus.train.common_checkpoints import MissingCheckpoints, newest_common
from isthmus.train.lifecycle import Lifecycle
from isthmus.train.process import Process
from isthmus.train.resume_check import no_checkpoint
from isthmus.train.stopping import Stopping
from isthmus.transport import Transport
from isthmus.transport.rendezvous import open_store


class StaticLifecycle(Lifecycle):
    """Batches by worker number; the checkpoint that all workers have; one last step for all.

    Args:
        config: of the run.
        process: this one.
        data_set: opened.
    """

    def __init__(self, config: RunConfig, process: Process, data_set: DataSet) -> None:
        self._config, self._process = config, process
        train = config.train
        self.batches = open_batches(data_set, train.seed, config.inner.batch_size, process.worker, train.workers)
        self.transport_options: dict[str, Any] = {}

    @override
    def batches_state(self, method_state: State) -> State:
        return dict(self.batches.state_dict())

    @override
    def load_batches_state(self, state: State) -> None:
        self.batches.load_state_dict(state)

    @override
    def choose_checkpoint(self, usable_steps: list[int], transport: Transport) -> int | None:
        step = newest_common(usable_steps, transport)
        if step is None:
            raise no_checkpoint(Path(self._config.train.run_dir))
        return step

    @override
    def has_caught_up(self, method_state: State) -> bool:
        return False

    @override
    def kept_metrics_bytes(self, path: Path, saved_bytes: int) -> int:
        return saved_bytes

    @override
    def begin(self, save: Callable[[], None] | None, transport: Transport) -> None:
        if save:
            save()
            transport.commit(transport.quorum(0), True)  # all have tried: killed at any step, the run can go on

    @override
    def missing_checkpoints(self) -> MissingCheckpoints:
        return MissingCheckpoints(self._open_store())

    @override
    def stopping(self, transport: Transport) -> Stopping:
        budget_seconds = self._config.outer.transport["sync_budget_seconds"]
        return Stopping(self._open_store(), self._process.world_rank, self._process.world_size, budget_seconds)

    @override
    def how_to_resume(self, step: int) -> str:
        if self._process.world_rank != 0:
            return ""
        how = f"isthmus train {self._config.train.run_dir}/config.yaml --resume"
        return f"stopped after step {step}; go on with: {how}"

    def _open_store(self) -> Store:
        return HashStore() if self._process.world_size == 1 else open_store()[0]
