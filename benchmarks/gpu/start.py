"""The beginning and the end of a run: `isthmus launch` as a user starts it, watched from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks import subject
from benchmarks.gpu.figures import Figure

FIRST_STEP_SECONDS, END_SECONDS, RUN_SECONDS, TRAINING_SECONDS = 12.0, 4.0, 30.0, 10.0
WORKERS = 2
_POLL_SECONDS = 0.02
_FOREIGN = re.compile(r"Warning|Traceback|leaked|^\[(?:W|E|rank)|^[WEF]\d{4} ")  # lines of libraries
CONFIG: dict[str, Any] = {
    "data": {"type": "text", "source": "stdlib"},
    "outer": {"recipe": "streaming", "schedule": {"local_steps": 20}},
    "train": {"steps": subject.START_STEPS, "workers": WORKERS, "eval_every": 0, "checkpoint_every": 0},
    **subject.START,
}


def measure(folder: Path) -> Iterator[Figure]:
    """Yield the seconds from the command to the first step of all workers, from their last one to the prompt."""
    run_dir, path = folder / "run", folder / "start.yaml"
    CONFIG["train"]["run_dir"] = str(run_dir)
    path.write_text(yaml.safe_dump(CONFIG))
    begin, marks = time.monotonic(), dict[str, float]()
    with (folder / "screen").open("wb") as screen:
        command = [sys.executable, "-m", "isthmus", "launch", str(path)]
        launcher = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT)
    while launcher.poll() is None:
        for name, step in (("first", 1), ("last", subject.START_STEPS)):
            if name not in marks and _all_did(run_dir, step):
                marks[name] = time.monotonic()
                if name == "first":
                    taken = marks["first"] - begin
                    yield Figure("from launch until both did their first step", taken, " s", FIRST_STEP_SECONDS)
        time.sleep(_POLL_SECONDS)
    end, said = time.monotonic(), (folder / "screen").read_text(errors="replace")
    if launcher.returncode:
        raise RuntimeError(said)
    training = max(json.loads((run_dir / "summary.json").read_text())["train_seconds"])
    yield Figure("from their last step to the prompt", end - marks.get("last", end), " s", END_SECONDS)
    goal = RUN_SECONDS - TRAINING_SECONDS
    what = f"the whole run of {subject.START_STEPS} steps, without {training:.1f} s of training"
    yield Figure(what, end - begin - training, " s", goal)
    logs = [line for log in sorted((run_dir / "logs").glob("*.log")) for line in log.read_text().splitlines()]
    foreign = [line for line in (*said.splitlines(), *logs) if _FOREIGN.search(line)]
    yield Figure("lines on the screen or in logs that isthmus did not mean", len(foreign), "", 0, details=foreign)


def _all_did(run_dir: Path, step: int) -> bool:
    return all(_did(run_dir / f"metrics/worker-{worker}.jsonl", step) for worker in range(WORKERS))


def _did(metrics: Path, step: int) -> bool:
    return metrics.exists() and f'"event": "step", "step": {step},' in metrics.read_text()
