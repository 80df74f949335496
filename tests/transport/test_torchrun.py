"""Ranks under torchrun find one another, also when it starts them again and nothing of before may be left."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import os, sys
from pathlib import Path
import torch
from isthmus.transport.rendezvous import open_store
from isthmus.transport.torch_dist import TorchDist

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
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
    os._exit(1)
transport.leave()
"""


def test_under_torchrun_and_started_again_by_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher} | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", str(program), str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lives = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
    assert lives == dict.fromkeys(["0-0", "0-1", "1-0", "1-1"], "[0.5, False]")
