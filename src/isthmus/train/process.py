"""The place of a process in a run: which worker it is, and which of its ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.inner.step import Batch
from isthmus.parallel import ParallelDims, open_mesh
from isthmus.train.assemble import choose_device, is_elastic
from isthmus.transport import Transport
from isthmus.transport.elastic.worker_ranks import check_num_ranks, worker_number
from isthmus.transport.rendezvous import JOIN_BUDGETS, RankLayout, find_world, initialise

RESTART_REASONS = "RESTART_REASONS"  # environment variable of a worker that was started again: why, each time, as JSON


def restart_reasons() -> list[str]:
    """Return why this worker was started again, for each time that it was."""
    reasons: list[str] = json.loads(os.environ.get(RESTART_REASONS, "[]"))
    return reasons


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    worker: int
    rank: int = 0  # inside the worker
    world_size: int = 1  # ranks of all workers; in an elastic world of this one
    mesh: ParallelDims = field(default_factory=ParallelDims)
    device_mesh: DeviceMesh | None = None  # [worker, pp, shard, tp], where a worker has several ranks

    @property
    def world_rank(self) -> int:
        """The number of this rank among those of all workers."""
        return self.worker * self.mesh.num_ranks + self.rank

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes files and log lines for its whole worker."""
        return self.rank == 0

    @property
    def dropout_seed(self) -> int:
        """A seed that only ranks share which compute the same: those of one slice of tensor parallelism."""
        return self.world_rank // self.mesh.tp

    def own_rows(self, batch: Batch) -> Batch:
        """Return this rank's slice of the worker's batch, without samples that do not make up a row for every slice."""
        shard, num_shards = self.mesh.coordinates(self.rank).shard, self.mesh.shard
        size = len(next(iter(batch.values()))) // num_shards
        return {name: tensor[shard * size : (shard + 1) * size] for name, tensor in batch.items()}

    def own_share(self, batches: list[Batch]) -> list[Batch]:
        """Return this rank's slices of several batches, without those too small to be shared out; refuse if all are."""
        slices = [self.own_rows(batch) for batch in batches]
        share = [rows for rows in slices if len(next(iter(rows.values())))]
        if batches and not share:
            found = f"shard is {self.mesh.shard}, and there are fewer validation samples"
            raise UserError(f"mesh: {found}: give more data, or make mesh.shard smaller")
        return share


def find_process(config: RunConfig) -> Process:
    """Return which worker and rank the launcher made this process; the ranks of a worker that has several connect.

    Raises:
        UserError: the launcher started too many or too few, or they cannot meet.
    """
    mesh, workers, elastic = config.mesh, config.train.workers, is_elastic(config)
    if elastic and mesh.num_ranks == 1:
        return Process(worker_number())
    rank, size = find_world()
    if mesh.num_ranks == 1:
        return Process(rank, world_size=size)
    if elastic:  # the world of torch.distributed is this worker alone
        check_num_ranks(size, mesh.num_ranks)
        worker, workers, names = worker_number(mesh.num_ranks), 1, [f"rank {r}" for r in range(size)]
    else:
        ranks = RankLayout(size, mesh.num_ranks)
        ranks.check(workers)
        names = [ranks.name(r) for r in range(size)]
        worker, rank = divmod(rank, mesh.num_ranks)
    device = choose_device()
    initialise(backend_of(device), JOIN_BUDGETS * config.outer.transport["sync_budget_seconds"], names)
    return Process(worker, rank, size, mesh, open_mesh(mesh, workers, device.type))


def backend_of(device: torch.device) -> str:
    """Return the backend of the process groups inside a worker whose ranks compute on such devices."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


@contextmanager
def peers_named(transport: Transport, step: int) -> Iterator[None]:
    """Turn the failure of a collective inside a training step into `PeerLost` with a name, where somebody is gone."""
    try:
        yield
    except RuntimeError:
        if transport.limits.elastic:
            transport.worker_group.check()
            raise
        transport.commit(transport.quorum(step), False)
        raise
