"""Elastic runs over the real engines, of workers with two ranks each, as `isthmus launch` starts them.

A rank dies, its worker goes and comes back as one; the run is stopped and resumed; what is committed stays one.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from tests.launched import finish, workers_of
from tests.program import Program
from tests.read_events import read_events

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
STEPS = 160
NAMES = ("worker-0", "worker-0-rank-1", "worker-1", "worker-1-rank-1")


def write(folder: Path, engine: str) -> Path:
    config = {
        "model": {
            "type": "module",
            "path": "tests.train.tiny:Paced",
            "arguments": {"hidden_size": 4, "go": str(folder / "go"), "seconds": 0.2},
            "sequence_length": 8,
        },
        "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
        "inner": {"batch_size": 2},
        "outer": {
            "recipe": "streaming",
            "schedule": {"local_steps": 6, "num_fragments": 1, "warm_start_steps": 0},
            "split": "whole",
            "transport": {"type": engine, "min_workers": 1, "sync_budget_seconds": 20.0},
            "hash_every": 1,
        },
        "train": {
            "workers": 2,
            "steps": STEPS,
            "run_dir": str(folder / "run"),
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 60,
        },
        "mesh": {"shard": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def syncs(folder: Path, worker: int) -> list[dict]:
    return read_events(folder / f"run/metrics/worker-{worker}.jsonl", "sync")


def wait_for(launcher: Program, condition, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, "".join(launcher.communicate())
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def stop_and_resume(launcher: Program, folder: Path) -> str:
    """As the launcher says when it is told to stop; to the end. Returns what it had said."""
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=60)
    assert json.loads((folder / "run/summary.json").read_text())["num_restarts"].count(1) == 1
    assert f"go on with: isthmus launch {folder}/run/config.yaml --resume" in said.replace("\n", "")
    (folder / "go").touch()
    resumed = Program("launch", folder / "run/config.yaml", "--resume")
    try:
        output = resumed.communicate(timeout=200)
    finally:
        resumed.kill()
    assert resumed.returncode == 0, "".join(output)
    return said


@pytest.mark.parametrize("engine", ["torchft", "hivemind"])
def test_a_worker_that_lost_a_rank_comes_back_whole(tmp_path, engine):
    launcher = Program("launch", write(tmp_path, engine))
    try:
        wait_for(launcher, lambda: len(syncs(tmp_path, 0)) > 5)
        before = workers_of(launcher)
        os.kill(before["worker-1-rank-1"], signal.SIGKILL)
        wait_for(launcher, lambda: any(sync["num_peers"] == 1 for sync in syncs(tmp_path, 0)))
        wait_for(launcher, lambda: syncs(tmp_path, 0)[-1]["num_peers"] == 2)
        stayed = set(workers_of(launcher).items()) & set(before.items())
        assert {name for name, _ in stayed} == set(NAMES[:2]), "the other rank was started again too"
        said = stop_and_resume(launcher, tmp_path)
    finally:
        launcher.kill()
    assert "streaming: worker 1 was killed by SIGKILL: it is started again, for the 1. time\n" in said
    (restart,) = read_events(tmp_path / "run/metrics/worker-1.jsonl", "restart")
    assert (restart["number"], restart["reason"]) == (1, "was killed by SIGKILL")
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
    code, _, err = finish(Program("train", path, "--set", "outer.transport.lighthouse=127.0.0.1:1"))
    assert code == 2
    assert err == (
        "error: a worker has 2 ranks, but 1 rank started: where workers come and go, each is started by a torchrun "
        "of its own, with its number in ISTHMUS_WORKER\n"
    )
