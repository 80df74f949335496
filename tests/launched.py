"""`isthmus launch` as a process of the tests: a small run, and what can be seen of it from outside."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.program import Program
from tests.read_events import read_events

ROOT = Path(__file__).parents[1]
RUN = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2},
    "outer": {
        "recipe": "diloco",
        "schedule": {"local_steps": 5, "warm_start_steps": 0},
        "transport": {"type": "torch_dist"},
    },
    "train": {"workers": 2, "eval_every": 20, "eval_batches": 1, "checkpoint_every": 50, "log_every": 5},
}


def finish(launcher: Program) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of a program; waits for its end."""
    out, err = launcher.communicate(timeout=120)
    return launcher.returncode, out, err


def wait_until(condition: Callable[[], object], within_seconds: float = 60) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(launcher: Program) -> dict[str, int]:
    """The processes that a launcher's server has started, by their names: "worker-1", "worker-1-rank-1"."""
    pids = [worker for server in _children(launcher.pid) for worker in _children(server)]
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in pids}


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def all_gone(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def events(run_dir: Path, kind: str, worker: int = 0) -> list[dict]:
    return read_events(run_dir / f"metrics/worker-{worker}.jsonl", kind)
