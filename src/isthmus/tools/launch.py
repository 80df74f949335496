"""All workers of a run on this machine: start them, watch them, stop them together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from rich.console import Console

from isthmus.config import RunConfig, dump
from isthmus.core import UserError
from isthmus.log import options as log_options
from isthmus.recipes.load import ENVIRONMENT_PREFIX
from isthmus.tools.progress import LiveProgress
from isthmus.tools.record import Record
from isthmus.train.assemble import SERVED_OPTIONS, is_elastic, transport_class
from isthmus.train.resume_check import check_resume
from isthmus.train.run_folder import metrics_path, name_of
from isthmus.transport.address import free_port
from isthmus.transport.rank_layout import RankLayout

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for the other workers to say what they know, once one has failed
_STOP = b"stop"
_MOST_DEATHS = 100  # of one worker of an elastic run, after which it is not started again


class WorkerFailed(Exception):
    """A worker ended before its time, and the configuration is not to blame. One line."""


class Interrupted(Exception):
    """Asked a second time to stop: everything was ended at once."""


def launch(config: RunConfig, console: Console, resume: bool = False, name: str | None = None) -> Record | None:
    """Run all workers of a configuration on this machine.

    The first Ctrl-C (or SIGTERM) has all workers stop after the same step with a checkpoint, a second one ends them at
    once.

    Args:
        config: the run; `train.workers` says how many.
        console: for progress.
        resume: go on from the newest checkpoint.
        name: what to call the run; None: its recipe.

    Returns:
        The finished run; None when it was stopped before its end.

    Raises:
        UserError: what the worker says that failed.
        WorkerFailed: a worker failed otherwise.
        Interrupted: a second Ctrl-C.
    """
    run_dir, name = Path(config.train.run_dir), name or config.outer.recipe
    if not resume and metrics_path(run_dir, 0).exists():
        raise UserError(f"{run_dir} holds a run already: go on with it by --resume, or choose another train.run_dir")
    if resume:
        check_resume(config)
    with transport_class(config).serve(config.outer.transport, run_dir) as known:
        return _run(config, known, console, resume, name)


def _run(config: RunConfig, known: dict[str, Any], console: Console, resume: bool, name: str) -> Record | None:
    run_dir, workers = Path(config.train.run_dir), config.train.workers
    ranks = f" of {config.mesh.num_ranks} ranks" if config.mesh.num_ranks > 1 else ""
    console.print(f"{name}: {workers} worker{'s'[: workers - 1]}{ranks}, {config.train.steps} steps, into {run_dir}")
    with (
        _counted_signals() as signals,
        Workers(config, resume, known) as processes,
        LiveProgress(run_dir, name, workers, config.train.steps, console) as progress,
    ):
        while processes.running():
            progress.look()
            if len(signals) > 1:
                raise Interrupted(f"ended at once; {how_to_resume(run_dir)}")
            if signals and not processes.stopping:
                console.print("stopping: the workers finish their step and save it (Ctrl-C again: end at once)")
                processes.stop()
            time.sleep(_POLL_SECONDS)
    record = Record.read(run_dir, name)
    return record if record.summary["finished"] else None


def how_to_resume(run_dir: Path) -> str:
    """What to tell whoever stopped a run."""
    if not any((run_dir / "checkpoints").glob("step-*/worker-*/manifest.json")):
        return f"{run_dir} holds no checkpoint yet"
    return f"go on with: isthmus launch {run_dir}/config.yaml --resume"


class Workers:
    """One process `isthmus train` a rank, each with its share of the cores and a log such as `logs/worker-k.log`.

    They hang on a pipe from this process, through which they are told to stop; they end when it ends.

    Args:
        config: the run.
        resume: go on from the newest checkpoint.
        known: of `outer.transport`, what holds for this launch alone; the run's own configuration does not keep it.
    """

    def __init__(self, config: RunConfig, resume: bool, known: dict[str, Any] | None = None) -> None:
        self._known = known or {}
        self.config, self.run_dir = config, Path(config.train.run_dir)
        self.stopping = False
        self._resume = resume
        self._processes: list[subprocess.Popen[bytes]] = []
        self._elastic = is_elastic(config)
        self._per_worker = config.mesh.num_ranks
        self._num_ranks = config.train.workers * self._per_worker
        self._num_deaths = [0] * config.train.workers

    def __enter__(self) -> Self:
        """Start all."""
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / "config.yaml"  # what workers are given; they write the run's own once they agree on it
        path.write_text(yaml.safe_dump(dump(self.config), sort_keys=False))
        command = [sys.executable, "-m", "isthmus", *log_options(), "train", str(path), "--on-leash"]
        world = self._world()
        self._start = partial(self._start_worker, command, world)
        for worker in range(self.config.train.workers):
            self._processes += self._start(worker)
        return self

    def _start_worker(self, command: list[str], world: dict[str, str], worker: int) -> list[subprocess.Popen[bytes]]:
        """All ranks of a worker; in an elastic world they are one to themselves."""
        ranks = self._ranks_of(worker)
        if self._elastic and self._per_worker > 1:
            own = {"ISTHMUS_WORKER": str(worker), "WORLD_SIZE": str(self._per_worker), "MASTER_PORT": str(free_port())}
            numbers = range(self._per_worker)
        else:
            own, numbers = {}, ranks
        resume = ["--resume"][: self._resume or self._num_deaths[worker]]
        return [
            self._start_one([*command, *resume], world | own | {"RANK": str(number), "LOCAL_RANK": str(rank)}, rank)
            for rank, number in zip(ranks, numbers, strict=True)
        ]

    def _start_one(self, command: list[str], env: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,  # the terminal's Ctrl-C reaches the launcher alone
            )

    def _ranks_of(self, worker: int) -> range:
        return range(worker * self._per_worker, (worker + 1) * self._per_worker)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End whoever still runs."""
        self._end(self._processes)

    def running(self) -> bool:
        """Whether any worker still runs.

        Raises:
            UserError: a worker ended with exit code 2; its message.
            WorkerFailed: a worker ended with another exit code but 0.
        """
        codes = [process.poll() for process in self._processes]
        for worker in range(self.config.train.workers):
            ranks = self._ranks_of(worker)
            if any(codes[rank] for rank in ranks) and self._may_come_back(worker):
                self._num_deaths[worker] += 1
                self._end([self._processes[rank] for rank in ranks])
                self._processes[ranks.start : ranks.stop] = self._start(worker)
                codes[ranks.start : ranks.stop] = [None] * self._per_worker
        if any(codes):
            self._explain()
        return None in codes

    def _may_come_back(self, worker: int) -> bool:
        """In an elastic run a worker that died is started again, as long as others live and it is not hopeless."""
        ranks = self._ranks_of(worker)
        lives = any(process.poll() is None for rank, process in enumerate(self._processes) if rank not in ranks)
        refused = any(self._processes[rank].poll() == 2 for rank in ranks)
        hopeless = refused or self._num_deaths[worker] >= _MOST_DEATHS or self._finished(worker)
        return self._elastic and lives and not self.stopping and not hopeless

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _finished(self, worker: int) -> bool:
        """Whether it came to the end of the run, and failed only to keep what it had there."""
        part = self.run_dir / f"worker-{worker}.json"
        return part.exists() and bool(json.loads(part.read_text())["finished"])

    def stop(self) -> None:
        """Have all workers stop after the same step."""
        self.stopping = True
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(_STOP)
                process.stdin.flush()
            except BrokenPipeError:
                continue  # it has ended by itself

    def _world(self) -> dict[str, str]:
        """The environment of all workers. The configuration they are given is final, so no layer of it is inherited."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        return inherited | {
            "WORLD_SIZE": str(self._num_ranks),
            SERVED_OPTIONS: json.dumps(self._known),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(free_port()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // self._num_ranks)),
        }

    def _explain(self) -> None:
        """Raise what went wrong: a user error before a worker's death, a death before what it did to the others."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and None in [process.poll() for process in self._processes]:
            time.sleep(_POLL_SECONDS)
        failed = [(process.returncode, rank) for rank, process in enumerate(self._processes) if process.returncode]
        code, rank = min(failed, key=lambda item: (item[0] != 2, item[0]))
        log, name = self._log(rank), RankLayout(self._num_ranks, self.config.mesh.num_ranks).name(rank)
        if code == 2:
            raise UserError(_last_words(log))
        if code < 0:
            raise WorkerFailed(f"{name} was killed by {signal.Signals(-code).name}; {how_to_resume(self.run_dir)}")
        raise WorkerFailed(f"{name} failed: {_last_words(log)} (all of it: {log})")

    def _log(self, rank: int) -> Path:
        return self.run_dir / "logs" / f"{name_of(*divmod(rank, self.config.mesh.num_ranks))}.log"


def follow_launcher() -> None:
    """In a worker: stop when the launcher says so, as if by SIGTERM; end when the launcher is gone."""

    def follow() -> None:
        while os.read(0, len(_STOP)):
            while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # training has not begun yet
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=follow, name="isthmus-leash", daemon=True).start()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _counted_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_words(log: Path) -> str:
    """The last error line of a log, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
