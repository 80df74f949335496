"""A whole run on this machine: its workers, live progress, and an end that is told."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from isthmus.config import RunConfig
from isthmus.tools.finished_run import FinishedRun
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.preflight import check_run
from isthmus.tools.progress import LiveProgress
from isthmus.tools.workers import Workers, how_to_resume
from isthmus.train.assemble import transport_class
from isthmus.train.resume_check import check_resume
from isthmus.train.run_folder import make_run_dir, refuse_begun

_POLL_SECONDS = 0.1


class Interrupted(Exception):
    """Asked a second time to stop: everything was ended at once."""


def launch(
    config: RunConfig, console: Console, server: ForkServer, resume: bool = False, name: str | None = None
) -> FinishedRun | None:
    """Run all workers of a configuration on this machine.

    The first Ctrl-C (or SIGTERM) has all workers stop after the same step with a checkpoint, a second one ends them at
    once.

    Returns:
        The finished run, called `name` or after its recipe; None when it was stopped before its end.

    Raises:
        UserError: the run cannot begin, or a worker says so.
        WorkerFailed: a worker failed otherwise.
        Interrupted: a second Ctrl-C.
    """
    run_dir, name = Path(config.train.run_dir), name or config.outer.recipe
    if resume:
        check_resume(config)
    else:
        refuse_begun(run_dir)
    check_run(config)
    make_run_dir(run_dir)
    workers = config.train.workers
    ranks = f" of {config.mesh.num_ranks} ranks" if config.mesh.num_ranks > 1 else ""
    console.print(f"{name}: {workers} worker{'s'[: workers - 1]}{ranks}, {config.train.steps} steps, into {run_dir}")

    def tell(line: str) -> None:
        console.print(f"{name}: {line}", soft_wrap=True)

    with (
        transport_class(config).serve(config.outer.transport, run_dir) as served_options,
        _counted_signals() as signals,
        Workers(config, server, resume, served_options, tell) as started,
        LiveProgress(run_dir, name, workers, config.train.steps, console) as progress,
    ):
        while started.running():
            progress.update()
            if len(signals) > 1:
                raise Interrupted(f"ended at once; {how_to_resume(run_dir)}")
            if signals and not started.stopping:
                console.print("stopping: the workers finish their step and save it (Ctrl-C again: end at once)")
                started.stop()
            time.sleep(_POLL_SECONDS)
    finished_run = FinishedRun.read(run_dir, name)
    return finished_run if finished_run.summary["finished"] else None


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
