"""Real worker processes for the tests: forks of a server that has imported torch and transformers once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.read_events import read_events
from tests.workers import CONTEXT

from isthmus.transport.address import free_port

ROOT = Path(__file__).parents[2]

# few steps, a sync in flight at step 14 (streaming: sent at 10, due at 15; eager: at any), nothing left in a hurry
COMMON = [
    f"data.source={ROOT / 'src/isthmus'}",
    "inner.batch_size=4",
    "outer.hash_every=1",
    "outer.schedule.warm_start_steps=0",
    "outer.transport.sync_budget_seconds=15",
    "train.steps=30",
    "train.eval_every=10",
    "train.eval_batches=2",
    "train.checkpoint_every=7",
    "train.log_every=1",
]
MESHES = {"shard": "mesh.shard=2", "tp": "mesh.tp=2", "pp": "mesh.pp=2"}
LOW_RANK = ["outer.compressor.compressor.rank=4"]  # at dilocox's own 32 so small a model would not be factorised
THREE_WORKERS = ("ddp", "streaming", "muloco", "sparseloco")  # recipes that are run with so many, too
NOT_ELEMENTWISE = ("sparseloco", "dilocox")  # what is kept depends on how the model is cut
TIMING = {"seconds", "hidden_seconds"}
_LETHAL = (-signal.SIGKILL, 1)  # exit codes of a worker after which the others are ended too


@dataclass
class Job:
    """One run of a worker, and what befalls it."""

    overrides: list[str]
    resume: bool | str = False
    signal_before_step: tuple[int, int, int] | None = None  # (worker, step, signal number): it sends it to itself
    step_seconds: float = 0.0  # slows every step
    workers_said: int | None = None  # by the configuration, where it is not the truth


def recipe(name: str) -> list[str]:
    """The configuration of a recipe, at a size at which it does what it is made for."""
    return [f"outer.recipe={name}", *(LOW_RANK if name == "dilocox" else [])]


def run(run_dir: Path, *overrides: str, num_workers: int = 2, **job: Any) -> list[int]:
    """Run the workers of one configuration; returns their exit codes. Once one is killed or fails, all are killed."""
    return run_jobs([Job([f"train.run_dir={run_dir}", *overrides], **job)], num_workers)


def run_jobs(jobs: list[Job], num_workers: int, within_seconds: float = 240) -> list[int]:
    """Run jobs one after the other in the same processes."""
    port = free_port()
    processes = [CONTEXT.Process(target=_work, args=(rank, num_workers, port, jobs)) for rank in range(num_workers)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + within_seconds
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline or any(process.exitcode in _LETHAL for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def _work(rank: int, num_workers: int, port: int, jobs: list[Job]) -> None:
    import torch

    from isthmus import log
    from isthmus.core import UserError
    from isthmus.recipes import load_config
    from isthmus.train.trainer import Trainer
    from isthmus.train.worker import train

    torch.set_num_threads(1)
    log.set_up()
    world = {"RANK": rank, "WORLD_SIZE": num_workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()})
    train_step = Trainer._train_step
    for job in jobs:

        def disturbed(trainer: Trainer, job: Job = job) -> None:
            if job.signal_before_step and job.signal_before_step[:2] == (rank, trainer.totals.steps + 1):
                os.kill(os.getpid(), job.signal_before_step[2])
            time.sleep(job.step_seconds)
            train_step(trainer)

        Trainer._train_step = disturbed
        overrides = [override.replace("{rank}", str(rank)) for override in [*COMMON, *job.overrides]]
        config = load_config(ROOT / "examples/tiny.yaml", overrides, job.workers_said or num_workers)
        write_to(Path(config.train.run_dir) / f"log-{rank}.txt")
        try:
            train(config, job.resume)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error


def write_to(path: Path) -> None:
    """Have what this process says written to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def said(run_dir: Path, worker: int) -> str:
    return (run_dir / f"log-{worker}.txt").read_text()


def events(run_dir: Path, worker: int, kind: str | None = None) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock."""
    found = read_events(run_dir / f"metrics/worker-{worker}.jsonl", kind)
    return [{key: value for key, value in event.items() if key not in TIMING} for event in found]


def losses(run_dir: Path, kind: str, after: int = 0) -> list[float]:
    """Of worker 0, after the steps that come `after` one."""
    return [event["loss"] for event in events(run_dir, 0, kind) if event["step"] > after]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def final_weights(run_dir: Path, worker: int) -> bytes:
    """The bytes of all tensors of the last checkpoint: model, anchors, outer and inner optimizer, residuals."""
    newest = max((run_dir / "checkpoints").glob(f"step-*/worker-{worker}"))
    return (newest / "state.safetensors").read_bytes()
