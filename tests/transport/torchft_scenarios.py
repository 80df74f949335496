"""What the workers of test_torchft.py do in processes of their own; each returns something JSON can hold."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
from links import connect, everybody, leave, meet
from transport_contract import run_checks

from isthmus.transport import TransportError
from isthmus.transport.peers import vote
from isthmus.transport.torchft.lighthouse import import_torchft, serve_lighthouse
from isthmus.transport.torchft.membership import TorchFTMembership

import_torchft()  # once, for all forks


def serve(rank, port):
    """A lighthouse until it is killed."""
    serve_lighthouse(f"127.0.0.1:{port}")


class Everybody:
    """A membership as a transport in which all take part alike: what the contract of transports can be tried on."""

    def __init__(self, membership):
        self.membership, self.num_workers = membership, 0
        self.now = time.monotonic
        self.commit = lambda peers, ok, fingerprint=b"": vote(peers, ok, fingerprint)

    def join(self, replica):
        self.member = connect(self.membership, 20)
        self.quorum(-1)

    def quorum(self, outer_step):
        found = meet(self.member, outer_step=outer_step + 1)
        assert all(info["outer_step"] == outer_step + 1 for info in found.members.values())
        self.num_workers = len(found.members)
        return everybody(self.member, found)

    def leave(self):
        leave(self.member)

    def wait_until(self, seconds):
        pass


def contract(rank, size, lighthouse):
    return run_checks(Everybody(TorchFTMembership(lighthouse, f"w{rank}", 20)), rank, size)


def lose_a_worker(rank, victim, how, lighthouse, budget, folder):
    """Three workers sync for ever; one is killed or stopped in the middle of a reduction, and comes back.

    Worker 3 takes the place and the name of the one that was killed. Everybody ends with the first sync of three that
    follows the blow.
    """
    killed = how == "SIGKILL"
    returned = rank == 3
    if returned:
        wait_for(lambda: (Path(folder) / "pid").exists())
        if not killed:
            return None
        pid = int((Path(folder) / "pid").read_text())
        wait_for(lambda: not alive(pid))
        wait_for(lambda: len(list(Path(folder).glob("survivor*"))) == 2)
    member = connect(TorchFTMembership(lighthouse, f"w{victim if returned else rank}", budget), budget)
    log, refused, syncs = [], returned, 0
    while True:
        try:
            start = time.monotonic()
            found = meet(member, budget)
            met = time.monotonic()
            peers = everybody(member, found)
            gathered = time.monotonic()
            if rank == victim and syncs == 2 and not refused:
                lose_oneself(how, folder)
            peers.all_reduce_mean([torch.zeros(2_000_000)])
            agreed = vote(peers, peers.size == 3 and refused, b"")
            syncs += 1
            log.append(["sync", list(found.members), met - start, gathered - met])
            if peers.size == 2 and (Path(folder) / "struck").exists():
                time.sleep(0.05)  # until the lost one is back there is nothing to see
                (Path(folder) / f"survivor{rank}").touch()
        except TransportError as error:
            refused = (Path(folder) / "struck").exists()
            log.append(["refused", str(error), time.monotonic()])
            continue
        if agreed:
            break
    leave(member)
    return {"log": log, "ended_at": time.monotonic(), "threads": [thread.name for thread in threading.enumerate()]}


def lose_oneself(how, folder):
    own = os.getpid()

    def strike():
        (Path(folder) / "struck").write_text(str(time.monotonic()))
        (Path(folder) / "pid").write_text(str(own))
        os.kill(own, getattr(signal, how))

    if how == "SIGSTOP" and os.fork() == 0:
        wait_for(lambda: len(list(Path(folder).glob("survivor*"))) == 2)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    threading.Timer(0.005, strike).start()
    time.sleep(0.003)


def die_while_waiting(rank, lighthouse, folder):
    """Worker 1 is killed while it waits for worker 2 to come; the others meet all the same."""
    member = connect(TorchFTMembership(lighthouse, f"w{rank}", 6))
    (Path(folder) / f"connected{rank}").touch()
    wait_for(lambda: len(list(Path(folder).glob("connected*"))) == 3)
    if rank == 1:
        (Path(folder) / "pid").write_text(str(os.getpid()))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2:
        wait_for(lambda: (Path(folder) / "pid").exists())
        pid = int((Path(folder) / "pid").read_text())
        wait_for(lambda: not alive(pid))
    found = meet(member)
    value = everybody(member, found).all_reduce_mean([torch.tensor([float(rank)])])[0].item()
    leave(member)
    return list(found.members), value


def wait_for(condition):
    while not condition():
        time.sleep(0.01)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
