"""The number and name of this process' worker in an elastic world, and the connection of its ranks."""

from __future__ import annotations

import os
from functools import partial

from isthmus.core.types import UserError, WorkerGroup
from isthmus.transport.base import RankLost
from isthmus.transport.heartbeat import Heartbeat
from isthmus.transport.rendezvous import find_world, initialise, open_store
from isthmus.transport.torch_dist import JOIN_BUDGETS, LINGER_SECONDS, make_own_group
from isthmus.transport.watched_group import WatchedGroup
from isthmus.transport.worker_group import SINGLE_RANK, GlooWorkerGroup

_WORKER_BUDGETS = 2 * JOIN_BUDGETS  # the first rank may wait so long for the other workers, and the others for it


def worker_number(ranks_per_worker: int = 1) -> int:
    """Return the number of this worker: ISTHMUS_WORKER, or where a worker has one rank RANK."""
    default = os.environ.get("RANK", "0") if ranks_per_worker == 1 else "0"
    number = os.environ.get("ISTHMUS_WORKER", default)
    if not number.isdecimal():
        raise UserError(f"ISTHMUS_WORKER is {number!r}: it should be this worker's number, from 0 on")
    return int(number)


def worker_name(ranks_per_worker: int = 1) -> str:
    """Return the name of this worker: the same after a restart."""
    return f"worker-{worker_number(ranks_per_worker)}"


def rank_in_worker(ranks_per_worker: int) -> int:
    """Return the rank of this process among those of its worker."""
    return find_world()[0] if ranks_per_worker > 1 else 0


def check_num_ranks(num_started: int, ranks_per_worker: int) -> None:
    """Refuse a worker of another number of ranks than its mesh has."""
    if num_started != ranks_per_worker:
        raise UserError(
            f"a worker has {ranks_per_worker} ranks, but {num_started} rank{'s'[: num_started - 1]} started: where "
            "workers come and go, each is started by a torchrun of its own, with its number in ISTHMUS_WORKER"
        )


def connect_worker_group(ranks_per_worker: int, sync_budget_seconds: float) -> WorkerGroup:
    """Connect the ranks of this worker: in an elastic world torch.distributed is theirs alone."""
    if ranks_per_worker == 1:
        return SINGLE_RANK
    rank, size = find_world()
    check_num_ranks(size, ranks_per_worker)
    names = [f"rank {other} of worker {worker_number(size)}" for other in range(size)]
    seconds = JOIN_BUDGETS * sync_budget_seconds
    initialise("gloo", seconds, names[rank])
    store, store_rank = open_store()
    heartbeat = Heartbeat(store, rank, size, store_rank, min(1.0, sync_budget_seconds / 20))
    missing = heartbeat.wait_for_all(seconds)
    if missing:
        raise RankLost(missing, f"{', '.join(names[other] for other in missing)} did not come within {seconds:g} s")
    heartbeat.start(names)
    budget_seconds, patience_seconds = _WORKER_BUDGETS * sync_budget_seconds, min(30.0, sync_budget_seconds / 3)
    group = WatchedGroup(heartbeat, budget_seconds, patience_seconds, kind="worker")
    group.connect(partial(make_own_group, [range(size)], rank, "gloo", budget_seconds))
    return GlooWorkerGroup(rank, size, group, close=partial(group.close, LINGER_SECONDS))
