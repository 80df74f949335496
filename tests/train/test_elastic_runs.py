"""Elastic runs with real processes over the real engines: killed, left, come back; what is committed stays one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests.launched import workers_of

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
STEPS = 300
RUN = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Paced",
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2},
    "outer": {"schedule": {"local_steps": 6, "num_fragments": 1, "warm_start_steps": 0}, "split": "whole"},
    "train": {"workers": 3, "steps": STEPS, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 60},
}
TRANSPORT = {"min_workers": 2, "sync_budget_seconds": 20.0}


def write(folder: Path, engine: str) -> Path:
    path = folder / "run.yaml"
    outer = RUN["outer"] | {"recipe": "streaming", "transport": TRANSPORT | {"type": engine}}
    model = RUN["model"] | {"arguments": {"hidden_size": 4, "go": str(folder / "go"), "seconds": 0.1}}
    config = RUN | {"model": model, "outer": outer, "train": RUN["train"] | {"run_dir": str(folder / "run")}}
    path.write_text(yaml.safe_dump(config))
    return path


def launch(config: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "isthmus", "launch", str(config), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def syncs(folder: Path, worker: int) -> list[dict]:
    path = folder / f"run/metrics/worker-{worker}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in events if event["event"] == "sync"]


def wait_for(launcher: subprocess.Popen, condition, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def final_state(folder: Path, worker: int) -> dict:
    """What the worker's last checkpoint holds of the transport."""
    newest = max((folder / "run/checkpoints").glob(f"step-*/worker-{worker}"))
    return json.loads((newest / "state.json").read_text())


def stop_and_resume(launcher: subprocess.Popen, folder: Path) -> str:
    """As the launcher says when it is told to stop; to the end. Returns what it had said."""
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=60)
    assert json.loads((folder / "run/summary.json").read_text())["num_restarts"].count(1) == 1
    assert f"go on with: isthmus launch {folder}/run/config.yaml --resume" in said.replace("\n", "")
    (folder / "go").touch()
    resumed = launch(folder / "run/config.yaml", "--resume")
    try:
        output, _ = resumed.communicate(timeout=200)
    finally:
        resumed.kill()
    assert resumed.returncode == 0, output
    return said


def test_a_killed_worker_is_started_again_and_catches_up(tmp_path):
    """`isthmus launch` makes the first peer itself, another one when the run is resumed.

    The lighthouse of torchft it makes in `test_elastic_meshes.py`.
    """
    launcher = launch(write(tmp_path, "hivemind"))
    try:
        wait_for(launcher, lambda: len(syncs(tmp_path, 0)) > 10)
        victim = workers_of(launcher)["worker-2"]
        os.kill(victim, signal.SIGKILL)
        wait_for(launcher, lambda: any(sync["num_peers"] == 2 for sync in syncs(tmp_path, 0)))
        wait_for(launcher, lambda: syncs(tmp_path, 0)[-1]["num_peers"] == 3)
        assert workers_of(launcher)["worker-2"] != victim
        said = stop_and_resume(launcher, tmp_path)
    finally:
        launcher.kill()
    assert "streaming: worker 2 was killed by SIGKILL: it is started again, for the 1. time\n" in said
    lines = (tmp_path / "run/metrics/worker-2.jsonl").read_text().splitlines()
    (restart,) = [event for event in map(json.loads, lines) if event["event"] == "restart"]
    assert (restart["number"], restart["reason"]) == (1, "was killed by SIGKILL")
    ledgers = [final_state(tmp_path, worker)["method"]["elastic"]["replicated_state"] for worker in range(3)]
    assert ledgers[0] == ledgers[1] == ledgers[2]
    assert ledgers[0]["samples"] > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert len(set(summary["anchor_hash"].values())) == 1
    assert summary["finished"]
    assert summary["steps"] == STEPS
