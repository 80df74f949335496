"""Ranks that torchrun starts again find one another, and nothing of their former lives."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import os
import torch
import torch.distributed as dist
from isthmus.transport.rendezvous import initialise, open_store

initialise("gloo", 30, "this rank")
total = torch.ones(1)
dist.all_reduce(total)
store, _ = open_store()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store.set("stop", "")
    dist.barrier()
    os._exit(1)
print("found", int(total), "ranks;", "told to stop" if store.check(["stop"]) else "not told to stop")
"""


def test_started_again_by_torchrun_they_know_nothing_of_before(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(program)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["found 2 ranks; not told to stop"] * 2
