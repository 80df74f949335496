"""What the workers of tests/transport do in processes of their own; each returns something JSON can hold."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from tests.hosts import enter
from transport_contract import run_checks

from isthmus.core import UserError
from isthmus.transport import PeerLost, TransportError, rendezvous
from isthmus.transport.torch_dist import TorchDist


def contract(rank):
    return run_checks(TorchDist(sync_budget_seconds=20), rank, int(os.environ["WORLD_SIZE"]))


def contract_where_initialised_already(rank):
    dist.init_process_group("gloo")
    outcomes = run_checks(TorchDist(sync_budget_seconds=20), rank, int(os.environ["WORLD_SIZE"]))
    ours = torch.ones(1)
    dist.all_reduce(ours)  # the user's own group still works
    dist.destroy_process_group()
    return outcomes, ours.item()


def average_on_hosts(rank, hosts, address, ranks_per_worker=1, **options):
    """Every worker has a host of its own."""
    enter(hosts[rank // ranks_per_worker])
    os.environ["MASTER_ADDR"] = address
    transport = TorchDist(20, ranks_per_worker=ranks_per_worker, **options)
    transport.join(None)
    value = transport.quorum(0).all_reduce_mean([torch.tensor([float(rank)])])[0].item()
    port = transport._link.address[1]
    transport.commit(transport.quorum(1), True)
    transport.leave()
    return value, port


def two_runs_in_one_process(rank):
    means = []
    for run in range(2):
        transport = TorchDist(sync_budget_seconds=20)
        transport.join(None)
        means.append(transport.quorum(0).all_reduce_mean([torch.tensor([float(rank + run)])])[0].item())
        transport.leave()
    return means


def join_only(rank, configs=None, expected_workers=None, budget=10.0, ranks_per_worker=None):
    """Try to join with this rank's configuration; return the error that a user would be told, if any."""
    shared_config, ranks = configs and configs[rank], ranks_per_worker[rank] if ranks_per_worker else 1
    transport = TorchDist(
        budget, shared_config=shared_config, expected_workers=expected_workers, ranks_per_worker=ranks
    )
    try:
        transport.join(None)
    except (UserError, PeerLost) as error:
        return str(error)
    transport.leave()
    return None


def read_late(rank, configs, seconds):
    """Join as a rank that reads what the others wrote only some seconds after all have written; rank 0 is in time."""
    wait_for = rendezvous._wait_for

    def wait_and_dawdle(*args):
        wait_for(*args)
        time.sleep(seconds * rank)

    rendezvous._wait_for = wait_and_dawdle
    return join_only(rank, configs)


def lose_a_worker(rank, victim, how, budget):
    """Average for ever; the victim dies or stops while a reduction runs. The others get `PeerLost` and exit with 3."""
    transport = TorchDist(budget)
    transport.join(None)
    peers, values = transport.quorum(7), torch.zeros(2_000_000)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), getattr(signal, how))).start()
    lost = {"exit_code": 3}
    try:
        while True:
            start = time.monotonic()
            peers.all_reduce_mean([values])
    except PeerLost as error:
        lost.update(seconds=time.monotonic() - start, ranks=error.ranks, message=str(error))
    try:
        transport.quorum(8).all_reduce_mean([values])
    except PeerLost as error:
        lost["again"] = error.ranks
    lost["ended_at"] = time.monotonic()
    transport.leave()
    dist.destroy_process_group()  # what scripts do at their end
    return lost


def pause(rank, budget, seconds):
    """Worker 1 is stopped for a while in the middle of a reduction."""
    transport = TorchDist(budget)
    transport.join(None)
    peers, own = transport.quorum(0), os.getpid()
    if rank == 1 and os.fork() == 0:
        time.sleep(0.3)
        os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    start = time.monotonic()
    for _ in range(10):
        peers.all_reduce_mean([torch.zeros(100_000)])
        time.sleep(0.1)
    paused = time.monotonic() - start > seconds
    transport.leave()
    return paused


def come_late(rank, budget):
    """Worker 1 is alive, but does not take part."""
    transport = TorchDist(budget)
    transport.join(None)
    peers = transport.quorum(0)
    peers.all_reduce_mean([torch.zeros(1)])
    if rank == 1:
        time.sleep(budget * 1.5)
        return None
    try:
        peers.all_reduce_mean([torch.zeros(1)])
    except PeerLost as error:
        return {"ranks": error.ranks, "message": str(error)}


def leave_early(rank, budget):
    """Worker 1 leaves; worker 0 averages on."""
    transport = TorchDist(budget)
    transport.join(None)
    peers = transport.quorum(0)
    peers.all_reduce_mean([torch.zeros(1)])
    if rank == 1:
        transport.leave()
        return None
    try:
        peers.all_reduce_mean([torch.zeros(1)])
    except PeerLost as error:
        return {"ranks": error.ranks, "message": str(error)}


def overlap_with_training(rank):
    """Collectives on a communication thread while the training thread uses a group of its own."""
    transport = TorchDist(20)
    transport.join(None)
    sums = []
    peers = transport.quorum(0)
    thread = threading.Thread(
        target=lambda: sums.extend(
            peers.all_reduce_mean([torch.full((100_000,), float(rank))])[0][0].item() for _ in range(20)
        )
    )
    thread.start()
    inner = torch.ones(1)
    for _ in range(50):
        dist.all_reduce(inner)
        inner /= 2
    thread.join()
    transport.leave()
    return sums, inner.item()


def raise_after_join(rank):
    """A worker whose own code fails must not hang at exit, nor may the one that then waits for it."""
    TorchDist(6).join(None)
    raise RuntimeError("my own mistake")


def call_after_leaving(rank):
    transport = TorchDist(10)
    transport.join(None)
    peers = transport.quorum(0)
    transport.leave()
    try:
        peers.all_reduce_mean([torch.zeros(1)])
    except TransportError as error:
        return str(error)
