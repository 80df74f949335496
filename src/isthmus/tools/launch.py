"""A whole run, on this machine or on hosts that it reaches: its workers, live progress, and an end that is told."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from rich.console import Console

from isthmus.config import RunConfig
from isthmus.signals import STOPPED, handled_by
from isthmus.tools.finished_run import FinishedRun
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.hosts import Hosts
from isthmus.tools.preflight import check_run
from isthmus.tools.progress import LiveProgress
from isthmus.tools.workers import Workers, how_to_resume, on_this_machine
from isthmus.train.resume_check import Resume, check_resume
from isthmus.train.run_folder import make_run_dir, refuse_begun

_POLL_SECONDS = 0.1


class Interrupted(Exception):
    """Asked a second time to stop: everything was ended at once."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = STOPPED if number == signal.SIGTERM else 130


def launch(
    config: RunConfig, console: Console, server: ForkServer | Hosts, resume: Resume = False, name: str | None = None
) -> FinishedRun | None:
    """Run all workers of a configuration, on this machine or on other hosts.

    The first Ctrl-C (or SIGTERM) has all workers stop after the same step with a checkpoint, a second one ends them at
    once.

    Returns:
        The finished run, called `name` or after its recipe; None when it was stopped before its end.

    Raises:
        AlreadyFinished: there is nothing left to do.
        UserError: the run cannot begin, or a worker says so.
        WorkerFailed: a worker failed otherwise.
        Interrupted: a second Ctrl-C.
    """
    run_dir, name = Path(config.train.run_dir), name or config.outer.recipe
    there = isinstance(server, Hosts)  # the run's folder and the data are: the workers say what is wrong with them
    if resume and not there:
        check_resume(config, may_begin=resume == "auto")
    elif not resume:
        refuse_begun(run_dir)
    check_run(config, with_data=not there)
    make_run_dir(run_dir)
    workers = config.train.workers
    ranks = f" of {config.mesh.num_ranks} ranks" if config.mesh.num_ranks > 1 else ""
    console.print(f"{name}: {workers} worker{'s'[: workers - 1]}{ranks}, {config.train.steps} steps, into {run_dir}")

    def tell(line: str) -> None:
        console.print(f"{name}: {line}", soft_wrap=True)

    signals: list[int] = []
    with (
        server.place(config, tell) if isinstance(server, Hosts) else on_this_machine(config, server) as placement,
        handled_by(lambda number, frame: signals.append(number)),
        Workers(config, placement, resume, tell) as started,
        LiveProgress(run_dir, name, workers, config.train.steps, console) as progress,
    ):
        while started.running():
            progress.update()
            if len(signals) > 1:
                raise Interrupted(f"ended at once; {how_to_resume(run_dir, placement.options)}", signals[-1])
            if signals and not started.stopping:
                console.print("stopping: the workers finish their step and save it (Ctrl-C again: end at once)")
                started.stop()
            time.sleep(_POLL_SECONDS)
    if not (run_dir / "summary.json").exists():
        return None  # all were stopped before they began
    finished_run = FinishedRun.read(run_dir, name)
    return finished_run if finished_run.summary["finished"] else None
