"""Ranks under torchrun find one another, also when it starts them again and nothing of before may be left."""

import os
import subprocess
import sys

import pytest

from isthmus.transport.address import free_port

pytestmark = pytest.mark.processes

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from isthmus.transport.rendezvous import open_store
from isthmus.transport.torch_dist import TorchDist

rank = os.environ["RANK"]
life = str(len(list(Path(sys.argv[1]).glob(f"?-{rank}"))))  # agents count their restarts each for itself
transport = TorchDist(30)
transport.join(None)
mean = transport.quorum(0).all_reduce_mean([torch.tensor([float(transport.rank)])])[0].item()
store = open_store()
found = [mean, store.check(["stop"])]
Path(sys.argv[1], f"{life}-{transport.rank}").write_text(str(found))
transport.quorum(1).all_gather([torch.zeros(1)])  # both have looked
if life == "0":
    store.set("stop", "")
    transport.quorum(2).all_gather([torch.zeros(1)])
    if rank == "0":
        os._exit(1)
    time.sleep(60)  # its agent ends it
transport.leave()
"""


@pytest.fixture
def agents(tmp_path):
    """Start agents of torchrun; wait for their end, and see what their ranks found."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher} | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1"]
    started = []

    def run(*lines):
        for options in lines:
            command = [*torchrun, *options, str(tmp_path / "program.py"), str(tmp_path)]
            started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        said = [each.communicate(timeout=120)[1] for each in started]
        assert [each.returncode for each in started] == [0] * len(started), said
        lives = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
        assert lives == dict.fromkeys(["0-0", "0-1", "1-0", "1-1"], "[0.5, False]")

    yield run
    for each in started:
        each.terminate()  # its ranks, too
        each.wait()


def test_under_torchrun_and_started_again_by_it(agents):
    agents(["--standalone", "--nproc-per-node", "2"])


def test_under_two_agents_of_torchrun_of_which_one_starts_its_rank_again(agents):
    world = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    world += ["--rdzv-endpoint", f"localhost:{free_port()}"]
    agents([*world, "--rdzv-conf", "is_host=1"], [*world, "--rdzv-conf", "is_host=0"])
