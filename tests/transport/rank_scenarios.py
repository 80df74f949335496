"""What the ranks of workers of two ranks do in processes of their own, for `test_ranks.py`."""

import math
import os
import signal
import threading
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transport_contract import run_checks
from transport_scenarios import join_only  # noqa: F401 (called by its name)

from isthmus.compress import Cast
from isthmus.core import SyncSchedule
from isthmus.core.fragment import Fragment
from isthmus.outer import OuterLoop
from isthmus.outer.guard import Guard
from isthmus.transport import Drift, PeerLost, TransportError, torch_dist
from isthmus.transport.torch_dist import TorchDist

RANKS = 2  # of a worker
torch.optim.SGD([torch.zeros(1)], lr=1.0)  # what torch imports for the first optimizer, once for all forks


def contract(rank):
    transport = TorchDist(20, ranks_per_worker=RANKS)
    return run_checks(transport, rank // RANKS, int(os.environ["WORLD_SIZE"]) // RANKS)


def average(rank):
    """Shards of another size at each place of a worker."""
    transport = TorchDist(20, expected_workers=2, ranks_per_worker=RANKS)
    transport.join(None)
    peers = transport.quorum(0)
    place = [transport.rank, transport.num_workers, peers.rank, peers.size]
    mean = peers.all_reduce_mean([torch.full((3 + 2 * (rank % RANKS),), float(rank))])[0].tolist()
    sent_bytes = peers.sent_bytes
    inside = [tensor.item() for (tensor,) in peers.worker_group.all_gather([torch.tensor(rank)])]
    assert peers.sent_bytes == sent_bytes
    transport.leave()
    return [place, mean, inside, sent_bytes]


def commit(rank, against=None, drifted=None):
    """One rank votes against it, or has other anchors."""
    transport = TorchDist(20, ranks_per_worker=RANKS)
    transport.join(None)
    peers = transport.quorum(0)
    try:
        return transport.commit(peers, rank != against, b"drifted!" if rank == drifted else b"original")
    except Drift as drift:
        return [drift.ranks, str(drift)]
    finally:
        transport.leave()


def lose_a_rank(rank, victim, budget):
    """Sync for ever; the victim dies. The others get `PeerLost` and exit with 3."""
    transport = TorchDist(budget, ranks_per_worker=RANKS)
    transport.join(None)
    peers, values = transport.quorum(7), torch.zeros(2_000_000)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    lost = {"exit_code": 3}
    try:
        while True:
            start = time.monotonic()
            peers.all_reduce_mean([values])
            peers.worker_group.all_gather([values[:1]])
    except PeerLost as error:
        lost.update(seconds=time.monotonic() - start, ranks=error.ranks, message=str(error))
    lost["ended_at"] = time.monotonic()
    transport.leave()
    dist.destroy_process_group()
    return lost


def uneven_peers(rank, budget):
    """Once one place of a worker has made more collectives than the other."""
    transport = TorchDist(budget, ranks_per_worker=RANKS)
    transport.join(None)
    peers = transport.quorum(0)
    for _ in range(1 + 5 * (rank % RANKS)):
        peers.all_reduce_mean([torch.zeros(1)])
    return peers


def come_late(rank, budget):
    """Rank 3 is alive, but does not come."""
    peers = uneven_peers(rank, budget)
    peers.worker_group.all_gather([torch.zeros(1)])
    if rank == 3:
        time.sleep(1.5 * budget)
        return None
    try:
        peers.all_reduce_mean([torch.zeros(1)])
        peers.worker_group.all_gather([torch.zeros(1)])
    except PeerLost as error:
        return [error.ranks, str(error)]


def come_late_inside(rank, budget):
    """Rank 2 waits for rank 3, which has made more collectives, but does not come to this one."""
    torch_dist._WORKER_BUDGETS = 1
    peers = uneven_peers(rank, budget)
    if rank == 3:
        time.sleep(1.5 * budget)
        return None
    try:
        peers.worker_group.all_gather([torch.zeros(1)])
    except PeerLost as error:
        return [error.ranks, str(error)]


def wait_inside(rank, budget, pauses, pause_seconds):
    """One place of a worker takes several slow collectives, the other waits for it inside the worker."""
    transport = TorchDist(budget, ranks_per_worker=RANKS)
    transport.join(None)
    peers = transport.quorum(0)
    for _ in range(pauses if rank % RANKS else 0):
        if rank == 3:
            time.sleep(pause_seconds)
        peers.all_reduce_mean([torch.zeros(1)])
    start = time.monotonic()
    peers.worker_group.all_gather([torch.zeros(1)])
    waited = time.monotonic() - start
    transport.leave()
    return waited


def call_after_leaving(rank):
    transport = TorchDist(20, ranks_per_worker=RANKS)
    transport.join(None)
    loop = build_loop(nn.Parameter(torch.zeros(3)), transport)
    loop.close()
    try:
        loop.anchor_hash()
    except TransportError as error:
        return str(error)


def build_loop(param, transport, **method):
    return OuterLoop(
        [Fragment.of("all", {"weight": param})],
        SyncSchedule(local_steps=2),
        transport=transport,
        outer_optimizer=partial(torch.optim.SGD, lr=1.0),
        **{"compressor": Cast(), **method},
    )


def train(rank, spoil=None, at=4, value=math.nan, wire="float32", max_norm_factor=10.0, workers=2):
    """Worker w takes steps of 0.1 (w + 1). In step `at` rank `spoil` gets a bad value into its shard."""
    transport = TorchDist(20, expected_workers=workers, ranks_per_worker=RANKS)
    param = nn.Parameter(torch.zeros(3 + 2 * (rank % RANKS)))
    method = {"compressor": Cast(wire), "guard": Guard(max_norm_factor)}
    loop = build_loop(param, transport, **method)
    reports = []
    for step in range(1, 7):
        with torch.no_grad():
            param -= 0.1 * (1 + rank // RANKS)
            if rank == spoil and step == at:
                param[0] = value
        reports += loop.step()
    anchor_hash = loop.anchor_hash()
    loop.close()
    return {
        "param": param.tolist(),
        "anchor_hash": anchor_hash,
        "norms": [report.norm for report in reports],
        "cosines": [report.cosine for report in reports],
        "committed": [report.committed for report in reports],
        "reasons": [report.reason for report in reports],
        "left_out": [report.left_out for report in reports],
    }


def train_from_other_weights(rank, odd):
    param = nn.Parameter(torch.full((4,), float(rank == odd)))
    try:
        build_loop(param, TorchDist(20, ranks_per_worker=RANKS))
    except Drift as drift:
        return drift.ranks
