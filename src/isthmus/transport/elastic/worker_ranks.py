"""The number and name of this process' worker in an elastic world, and the connection of its ranks."""

from __future__ import annotations

import os
from dataclasses import replace

from isthmus.core.types import UserError, WorkerGroup
from isthmus.link import MemberLost
from isthmus.transport.base import PeerLost, RankLost
from isthmus.transport.link_end import LinkOptions
from isthmus.transport.link_peers import LinkWorkerGroup
from isthmus.transport.rendezvous import JOIN_BUDGETS, RankLink, find_world, initialise
from isthmus.transport.worker_group import SINGLE_RANK

_OFFSET = "ISTHMUS_WORKER_OFFSET"
# what launchers and schedulers set, in the order of precedence; see docs/elasticity.md
_RANKS = ("RANK",)
_WORKERS = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
_TASKS = ("SLURM_PROCID", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK")
_WORKER_BUDGETS = 2 * JOIN_BUDGETS  # the first rank may wait so long for the other workers, and the others for it


def worker_number(ranks_per_worker: int = 1) -> int:
    """Return the number of this worker: ISTHMUS_WORKER, or what started it says, plus ISTHMUS_WORKER_OFFSET.

    Those who start workers count from 0 at every site, so each site has its offset. What counts the ranks inside a
    worker of several says nothing about the worker.
    """
    if "ISTHMUS_WORKER" in os.environ:
        return _read_number("ISTHMUS_WORKER", "this worker's number")
    counted = (*_RANKS, *_WORKERS, *_TASKS) if ranks_per_worker == 1 else _WORKERS
    offset = _read_number(_OFFSET, "the number of this site's first worker") if _OFFSET in os.environ else 0
    found = [_read_number(name, "a number that a scheduler gives") for name in counted if name in os.environ]
    return offset + (found[0] if found else 0)


def _read_number(name: str, what: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}: it should be {what}, from 0 on")
    return int(value)


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


def connect_worker_group(ranks_per_worker: int, sync_budget_seconds: float, options: LinkOptions) -> WorkerGroup:
    """Connect the ranks of this worker: in an elastic world torch.distributed is theirs alone."""
    if ranks_per_worker == 1:
        return SINGLE_RANK
    rank, size = find_world()
    check_num_ranks(size, ranks_per_worker)
    names = [f"rank {other} of worker {worker_number(size)}" for other in range(size)]
    seconds = JOIN_BUDGETS * sync_budget_seconds
    link = RankLink(sync_budget_seconds, replace(options, port=0, announce=None, via=None))
    try:
        initialise("gloo", seconds, names)
        members = [info.member(r, names[r]) for r, info in enumerate(link.exchange_info(rank, names, {}))]
        group = link.open("the worker", members, rank, seconds)
    except (PeerLost, MemberLost) as lost:
        raise RankLost(lost.ranks, str(lost)) from lost
    return LinkWorkerGroup(group, _WORKER_BUDGETS * sync_budget_seconds, close=link.close)
