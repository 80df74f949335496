"""A worker of an elastic run: it may come late, leave early, and need not take every step."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore

from isthmus.core import State, UserError
from isthmus.data import DataSet
from isthmus.data.leased_batches import LeasedBatches, LeasesExhausted
from isthmus.data.ledger import Ledger
from isthmus.outer import OuterLoop
from isthmus.train import assemble
from isthmus.train.folder import metrics_path
from isthmus.train.leases import Leases
from isthmus.train.metrics import Totals, whole_lines
from isthmus.train.stopping import Stopping
from isthmus.train.trainer import Trainer
from isthmus.transport import TransportError
from isthmus.transport.elastic.ranks import worker_name
from isthmus.transport.rendezvous import open_store

_LOGGER = logging.getLogger(__name__)


class ElasticTrainer(Trainer):
    """As `Trainer`, but the run's progress is the outer loop's, and the data come from the ledger."""

    stream: Leases
    method: OuterLoop

    def restore(self) -> None:
        """Go on from this worker's own newest checkpoint.

        Where the others were ahead, so that it has caught up already, it takes only what nobody else has: the inner
        optimizer and what it has counted.
        """
        self.checkpoints.discard_half_done()
        usable = self._usable_to_all()
        if usable and self.method.state.elastic_state["version"] > 0:
            state = self._load(max(usable))
            self._restore_inner_step(state["inner_step"])
            self.totals = Totals(**state["totals"])
        elif usable:
            self._become(self._load(max(usable)), max(usable))
        self._metrics_bytes = whole_lines(metrics_path(self.run_dir, self.worker))  # the others went on: nothing is cut

    def run(self) -> dict[str, Any]:
        """Train until the run is finished, or this worker is told to leave."""
        self._open_folder()
        size, elastic = self.process.world_size, self.method.transport.elastic
        assert elastic is not None
        store = HashStore() if size == 1 else open_store()[0]
        seconds = self.config.outer.transport["sync_budget_seconds"]
        try:
            with Stopping(store, self.process.rank, size, seconds, elastic.interrupt) as stopping:
                turns = itertools.count(1)  # equal on all ranks; a worker need not take every step
                while self.method.state.phase != "finished" and stopping.may_start(next(turns)):
                    if (
                        self.method.state.phase == "training"
                        and self.method.state.inner_steps < self.config.train.steps
                    ):
                        self._train_step()
                    else:
                        self._note(self.method.finish())
            finished = self.method.state.phase == "finished"
            if finished:
                self._evaluate()
            self._save(finished, last=True)
            self._leave()
        except TransportError as error:
            self.metrics.write("fault", step=self.position, reason=str(error))
            raise
        finally:
            self.metrics.close()
        if not finished and self.process.is_first_rank:
            torchrun = f"ISTHMUS_WORKER={self.worker} torchrun --standalone --nproc-per-node {size} -m isthmus"
            how = torchrun if size > 1 else f"RANK={self.worker} isthmus"
            how += f" train {self.run_dir}/config.yaml --resume"
            _LOGGER.info("left after step %s; come back with: %s", self.position, how)
        return self._end(finished)

    @property
    def position(self) -> int:
        """Steps of the whole run that are done, by whoever was there."""
        return self.method.state.inner_steps

    def _usable_to_all(self) -> list[int]:
        """Steps of which every rank of this worker holds a checkpoint."""
        usable = self.checkpoints.usable()
        if self.process.world_size == 1:
            return usable
        lists: list[list[int]] = [[]] * self.process.world_size
        dist.all_gather_object(lists, usable)
        return sorted(set[int].intersection(*map(set, lists)))

    def _train_step(self) -> None:
        self.inner_step.set_progress(self.position)
        self.method.local_steps.start_step(self.clock())  # the time of a step is without evaluations and checkpoints
        try:
            super()._train_step()
        except LeasesExhausted:
            self._note(self.method.skip())

    def _open_stream(self, data_set: DataSet) -> Leases:
        config = self.config
        if config.outer.schedule is None:
            raise UserError(f"{config.outer.recipe} has no outer loop: it needs outer.transport.type torch_dist")
        name = worker_name(self.process.mesh.num_ranks)
        stream = LeasedBatches(data_set.sample_order(config.train.seed), name, config.inner.batch_size)
        return Leases(stream, config.outer.schedule.local_steps)

    def _stream_state(self) -> State:
        """The position in this worker's leases, as the outer loop's state knows them: a sync may be ahead of it."""
        ledger = Ledger.from_state_dict(self.method.state.elastic_state["replicated_state"])
        proposals = [sync.proposal for sync in self.method.state.in_flight.values() if sync.proposal]
        return self.stream.stream.state_as_of(ledger, [proposal["samples"] for proposal in proposals])

    def _restore_stream(self, state: State) -> None:
        self.stream.stream.load_state_dict(state)

    def _build_method(self) -> OuterLoop:
        method = assemble.build_method(self.config, self.model, replicated_state=self.stream, say=_LOGGER.info)
        assert isinstance(method, OuterLoop)
        return method
