"""All workers of a run as processes of this machine: started, watched, started again, told to stop."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml

from isthmus.config import RunConfig, dump
from isthmus.core import UserError
from isthmus.core.cores import num_cores
from isthmus.core.imports import allowed_imports
from isthmus.log import options as log_options
from isthmus.models import MODELS
from isthmus.recipes.load import ENVIRONMENT_PREFIX
from isthmus.signals import STOPPED, ends_process
from isthmus.tools.fork_server import LOST, ForkServer, WorkerProcess, WorkerServer, end
from isthmus.train.assemble import SERVED_OPTIONS, is_elastic, transport_class
from isthmus.train.process import RESTART_REASONS
from isthmus.train.resume_check import Resume, has_checkpoints
from isthmus.train.run_folder import name_of
from isthmus.transport.address import free_port
from isthmus.transport.rendezvous import RankLayout

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for the other workers to say what they know, once one has failed
_STOP = b"stop"
_MOST_RESTARTS = 100  # of one worker of an elastic run


class WorkerFailed(Exception):
    """A worker ended before its time, and the configuration is not to blame. One line."""


@dataclass(frozen=True)
class Placement:
    """Where the workers of a run are started.

    Attributes:
        servers: of each worker.
        environment: that all their ranks share.
        options: of the command line that the run goes on with.
    """

    servers: Sequence[WorkerServer]
    environment: dict[str, str]
    options: str = ""


@contextmanager
def on_this_machine(config: RunConfig, server: ForkServer) -> Iterator[Placement]:
    """Place all workers on this machine, with something to meet at if they need it."""
    workers, run_dir = config.train.workers, Path(config.train.run_dir)
    with transport_class(config).serve(config.outer.transport, run_dir) as served:
        world = world_environment(workers * config.mesh.num_ranks)
        yield Placement([server] * workers, world | {SERVED_OPTIONS: json.dumps(served)})


class Workers:
    """One process `isthmus train` a rank, each with its share of the cores and a log such as `logs/worker-1.log`.

    Each reads from a pipe of this process: through it they are told to stop, and they end when it breaks. In an elastic
    run a worker that died is started again, with all of its ranks, and `tell` is given a line.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        resume: Resume,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.config, self.run_dir = config, Path(config.train.run_dir)
        self.stopping = False
        self._placement, self._resume, self._tell = placement, resume, tell
        self._elastic = is_elastic(config)
        self._layout = RankLayout(config.train.workers * config.mesh.num_ranks, config.mesh.num_ranks)
        self._children: list[list[WorkerProcess]] = []  # the ranks of each worker
        self._restarts: list[list[str]] = [[] for _ in range(config.train.workers)]  # why, for each worker

    def __enter__(self) -> Self:
        """Start all workers."""
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        self._config_path = logs / "config.yaml"  # what workers are given; they write the run's own once they agree
        self._config_path.write_text(as_yaml(self.config))
        for server in dict.fromkeys(self._placement.servers):
            server.import_modules(getattr(MODELS.get(self.config.model["type"]), "libraries", ()))
        for worker in range(self.config.train.workers):
            self._children.append(self._start(worker))
        return self

    def __exit__(self, *error: object) -> None:
        """End whoever still runs."""
        end(self._all)

    def running(self) -> bool:
        """Return whether any worker still runs.

        Raises:
            UserError: a worker ended with exit code 2; its message.
            WorkerFailed: a worker ended with another exit code but 0, or that of one that was stopped.
        """
        codes = [[_code_of(child) for child in ranks] for ranks in self._children]
        for worker, ranks in enumerate(codes):
            if any(ranks) and self._may_come_back(worker):
                self._restart(worker)
                codes[worker] = [None]
        if any(map(any, codes)):
            self._explain()
        return any(None in ranks for ranks in codes)

    def stop(self) -> None:
        """Have all workers stop after the same step."""
        self.stopping = True
        for child in self._all:
            child.tell(_STOP)

    @property
    def _all(self) -> list[WorkerProcess]:
        return [child for ranks in self._children for child in ranks]

    def _start(self, worker: int) -> list[WorkerProcess]:
        """Start all ranks of a worker; in an elastic world they have a process group of torch to themselves."""
        num_ranks, world = self._layout.per_worker, self._placement.environment
        server, first = self._placement.servers[worker], worker * num_ranks
        local_rank = num_ranks * self._placement.servers[:worker].count(server)
        apart = self._elastic and num_ranks > 1
        if apart:
            world = world | {"ISTHMUS_WORKER": str(worker), "WORLD_SIZE": str(num_ranks)}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if self._restarts[worker]:
            world = world | {RESTART_REASONS: json.dumps(self._restarts[worker])}
        resume = ["--resume", "auto"] if self._resume == "auto" else ["--resume"] if self._resume else []
        resume = ["--resume"] if self._restarts[worker] else resume
        command = [*log_options(), "train", str(self._config_path), "--follow-stdin", *resume]
        return [
            server.start(
                command,
                world | {"RANK": str(rank if apart else first + rank), "LOCAL_RANK": str(local_rank + rank)},
                self._log(worker, rank),
                name_of(worker, rank),
            )
            for rank in range(num_ranks)
        ]

    def _restart(self, worker: int) -> None:
        """Start a worker again, unless its machine is away: then the others go on, and this is asked again."""
        if not self._placement.servers[worker].is_ready():
            return
        dead = self._children[worker]
        reason = self._reason(worker, next(rank for rank, child in enumerate(dead) if _code_of(child)))
        self._restarts[worker].append(reason)
        end(dead)
        self._tell(f"worker {worker} {reason}: it is started again, for the {len(self._restarts[worker])}. time")
        self._children[worker] = self._start(worker)

    def _may_come_back(self, worker: int) -> bool:
        """In an elastic run a worker that died is started again, as long as others live and it is not hopeless."""
        own = self._children[worker]
        lives = any(child.poll() is None for child in self._all if child not in own)
        refused = any(child.poll() == 2 for child in own)
        hopeless = refused or len(self._restarts[worker]) >= _MOST_RESTARTS or self._has_finished(worker)
        return self._elastic and lives and not self.stopping and not hopeless

    def _has_finished(self, worker: int) -> bool:
        """Return whether a worker came to the end of the run, and failed only to keep what it had there."""
        part = self.run_dir / f"worker-{worker}.json"
        return part.exists() and bool(json.loads(part.read_text())["finished"])

    def _explain(self) -> None:
        """Raise what went wrong: a user error before a worker's death, a death before what it did to the others."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and None in [child.poll() for child in self._all]:
            time.sleep(_POLL_SECONDS)
        failed = [(code, number) for number, child in enumerate(self._all) if (code := _code_of(child))]
        code, number = min(failed, key=lambda item: (item[0] != 2, item[0]))
        worker, rank = divmod(number, self._layout.per_worker)
        if code == 2:
            raise UserError(_last_words(self._log(worker, rank)))
        what_next = (
            how_to_resume(self.run_dir, self._placement.options)
            if code < 0
            else f"all of it: {self._log(worker, rank)}"
        )
        raise WorkerFailed(f"{self._layout.name(number)} {self._reason(worker, rank)}; {what_next}")

    def _reason(self, worker: int, rank: int) -> str:
        """Return how a rank has ended: 'was killed by SIGKILL'."""
        code = self._children[worker][rank].returncode or 0
        if code == LOST:
            return f"is gone: {_last_words(self._log(worker, rank))}"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"failed: {_last_words(self._log(worker, rank))}"

    def _log(self, worker: int, rank: int) -> Path:
        return self.run_dir / "logs" / f"{name_of(worker, rank)}.log"


def _code_of(child: WorkerProcess) -> int | None:
    """Return the exit code of a worker, 0 of one that was stopped and has saved; None while it runs."""
    code = child.poll()
    return 0 if code == STOPPED else code


def as_yaml(config: RunConfig) -> str:
    """Return a configuration as the text of a file."""
    return yaml.safe_dump(dump(config), sort_keys=False)


def how_to_resume(run_dir: Path, options: str = "") -> str:
    """Return what to tell whoever stopped a run that was launched with these options."""
    if not has_checkpoints(run_dir):
        return f"{run_dir} holds no checkpoint yet"
    allowed = "".join(f" --allow {module}" for module in allowed_imports())
    return f"go on with: isthmus launch {run_dir}/config.yaml --resume{options}{allowed}"


def world_environment(num_ranks: int) -> dict[str, str]:
    """Return the environment that all ranks of this machine share.

    The configuration that they are given is final, so no layer of it is inherited.
    """
    layers = [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and "__" in name]
    own = (*layers, "ISTHMUS_WORKER", "ISTHMUS_WORKER_OFFSET")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return inherited | {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(free_port()),
        "OMP_NUM_THREADS": threads if threads.isdigit() else str(max(1, num_cores() // num_ranks)),
    }


def follow_stdin() -> None:
    """Stop this worker when standard input says so, as if by SIGTERM; end it when standard input closes."""

    def follow() -> None:
        while os.read(0, len(_STOP)):
            while ends_process(signal.SIGTERM):  # training has not begun yet
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=follow, name="isthmus-stdin", daemon=True).start()


def _last_words(log: Path) -> str:
    """Return the last error line of a log, else its last exception, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or _exceptions(lines) or lines or ["it said nothing"])[-1]


def _exceptions(lines: Iterable[str]) -> list[str]:
    """Return what the tracebacks in a log end with, each without what torchrun puts before it."""
    found, prefix = [], None
    for line in lines:
        if "Traceback (most recent call last)" in line:
            prefix = line.partition("Traceback")[0]
        elif prefix is not None and not line.removeprefix(prefix).startswith(" "):
            found.append(line.removeprefix(prefix))
            prefix = None
    return found
