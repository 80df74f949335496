"""Elastic runs whose workers have two ranks each: a rank dies, its worker goes and comes back as one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_elastic_runs import ROOT, RUN, launch, stop_and_resume, syncs, wait_for
from tests.launched import workers_of

pytestmark = pytest.mark.processes

STEPS = 160
NAMES = ("worker-0", "worker-0-rank-1", "worker-1", "worker-1-rank-1")


def write(folder: Path, engine: str) -> Path:
    transport = {"type": engine, "min_workers": 1, "sync_budget_seconds": 20.0}
    outer = RUN["outer"] | {"recipe": "streaming", "transport": transport, "hash_every": 1}
    arguments = {"hidden_size": 4, "go": str(folder / "go"), "seconds": 0.2}
    config = RUN | {
        "model": RUN["model"] | {"arguments": arguments},
        "outer": outer,
        "train": RUN["train"] | {"workers": 2, "steps": STEPS, "run_dir": str(folder / "run")},
        "mesh": {"shard": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("engine", ["torchft", "hivemind"])
def test_a_worker_that_lost_a_rank_comes_back_whole(tmp_path, engine):
    launcher = launch(write(tmp_path, engine))
    try:
        wait_for(launcher, lambda: len(syncs(tmp_path, 0)) > 5)
        before = workers_of(launcher)
        os.kill(before["worker-1-rank-1"], signal.SIGKILL)
        wait_for(launcher, lambda: any(sync["num_peers"] == 1 for sync in syncs(tmp_path, 0)))
        wait_for(launcher, lambda: syncs(tmp_path, 0)[-1]["num_peers"] == 2)
        stayed = set(workers_of(launcher).items()) & set(before.items())
        assert {name for name, _ in stayed} == set(NAMES[:2]), "the other rank was started again too"
        stop_and_resume(launcher, tmp_path)
    finally:
        launcher.kill()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == STEPS
    assert len(set(summary["anchor_hash"].values())) == 1
    states = {name: final_state(tmp_path, name) for name in NAMES}
    transports = [state["method"]["elastic"] for state in states.values()]
    assert all(transport == transports[0] for transport in transports)
    assert transports[0]["replicated_state"]["samples"] > 0
    for worker in (0, 1):
        first, other = (states[name] for name in NAMES if name.startswith(f"worker-{worker}"))
        assert first["stream"] == other["stream"], "they read the same samples"
        assert first["totals"]["steps"] == other["totals"]["steps"]


def final_state(folder: Path, name: str) -> dict:
    newest = max((folder / "run/checkpoints").glob(f"step-*/{name}"))
    return json.loads((newest / "state.json").read_text())


def test_a_worker_of_too_few_ranks_is_refused(tmp_path):
    path = write(tmp_path, "torchft")
    command = [sys.executable, "-m", "isthmus", "train", str(path), "--set", "outer.transport.lighthouse=127.0.0.1:1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: a worker has 2 ranks, but 1 rank started: where workers come and go, each is started by a torchrun "
        "of its own, with its number in ISTHMUS_WORKER\n"
    )
