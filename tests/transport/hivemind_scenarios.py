"""What the workers of test_hivemind.py do in processes of their own; each returns something JSON can hold."""

import atexit
import os
import signal
import threading
import time
from pathlib import Path

import hivemind.dht.protocol
import torch
from links import connect as connect_member
from links import everybody, leave, meet

from isthmus.core import UserError
from isthmus.transport import TransportError
from isthmus.transport.hivemind.membership import HivemindMembership
from isthmus.transport.hivemind.node_settings import NodeSettings

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


def connect(rank, folder, budget):
    """Worker 0 is the first peer of the others."""
    folder = Path(folder)
    addresses = folder / "addresses"
    if rank:
        wait_for(addresses.exists)
    peers = addresses.read_text().split() if rank else []
    settings = NodeSettings(folder / f"w{rank}.key", peers, LISTEN)
    worker = connect_member(HivemindMembership(f"w{rank}", "run", settings), budget)
    if rank == 0:
        (folder / "new").write_text(" ".join(worker.membership.addresses()))
        (folder / "new").rename(addresses)
    return worker


def lose_a_worker(rank, victim, how, budget, folder):
    """All exchange for ever; the victim dies or stops in the middle. The others meet again without it."""
    worker = connect(rank, folder, budget)
    (Path(folder) / f"here{rank}").touch()
    wait_for(lambda: len(list(Path(folder).glob("here*"))) == 3)
    peers = everybody(worker, meet(worker, 30))
    struck = Path(folder) / "struck"
    try:
        while True:
            peers.all_to_all([[torch.zeros(4_000_000)] for _ in range(peers.size)])
            if rank == victim and not struck.exists():
                struck.write_text(f"{time.monotonic()} {os.getpid()} {worker.membership._node.p2p._child.pid}")
                threading.Timer(0.05, os.kill, (os.getpid(), getattr(signal, how))).start()
    except TransportError as error:
        reason, noticed = str(error), time.monotonic()
    try:
        peers.all_gather([torch.zeros(1)])
        again = ""
    except TransportError as error:
        again = str(error)
    found = meet(worker)
    met = time.monotonic()
    mean = everybody(worker, found).all_reduce_mean([torch.tensor([float(rank)])])[0].item()
    leave(worker)
    struck_at = float(struck.read_text().split()[0])
    return {"reason": reason, "noticed": noticed - struck_at, "again": again, "names": list(found.members),
            "met": met - noticed, "mean": mean}  # fmt: skip


def die_while_waiting(rank, folder):
    """Worker 1 is killed while it waits in a rendezvous, and comes back at once; then worker 2 joins in."""
    folder = Path(folder)
    if rank == 2:  # the one that comes back: same name, same key
        wait_for((folder / "pid").exists)
        wait_for(lambda: not alive(int((folder / "pid").read_text())))
    worker = connect(min(rank, 1), folder, 10)
    if rank == 0:
        wait_for((folder / "pid").exists)
        wait_for(lambda: not alive(int((folder / "pid").read_text())))
        wait_for((folder / "back").exists)
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2:
        (folder / "back").touch()
    found = meet(worker, rank=rank)
    mean = everybody(worker, found).all_reduce_mean([torch.tensor([float(rank)])])[0].item()
    leave(worker)
    return {"ranks": {name: info["rank"] for name, info in found.members.items()}, "mean": mean}


def clock_is_wrong(rank, folder):
    """Worker 1 lives in another minute."""
    if rank:
        now = hivemind.dht.protocol.get_dht_time
        hivemind.dht.protocol.get_dht_time = lambda: now() + 60
    try:
        worker = connect(rank, folder, 10)
    except UserError as error:
        (Path(folder) / "done").touch()
        return str(error)
    wait_for((Path(folder) / "done").exists)
    leave(worker)
    return ""


def forgets_to_leave(rank, folder):
    """The program ends without a word: no daemon may stay."""
    worker = connect(rank, folder, 10)
    atexit.register(worker.membership.leave)  # as an elastic transport does
    return worker.membership._node.p2p._child.pid


def wait_for(condition):
    while not condition():
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
