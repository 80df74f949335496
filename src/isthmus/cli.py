"""The command line: demo, train, launch, show, profile, doctor, export; identity, lighthouse, dht, relay."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isthmus import log
from isthmus.signals import STOPPED
from isthmus.tools import servers
from isthmus.tools.arguments import Commands, ResumeMode, ResumingCommand
from isthmus.tools.host_options import HostAddress, HostNames, HostPython, open_hosts

_DEMO_STEP_SECONDS = 0.2  # of all runs, one step each, on two cores

# Commands import their parts themselves: torch takes seconds, and `--help` needs none of it.

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model on clusters joined by slow, unreliable links.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override outer.schedule.local_steps=50, say.", show_default=False),
]
NumWorkers = Annotated[int | None, typer.Option("--workers", min=1, help="How many workers.", show_default=False)]
RoundTripMs = Annotated[float, typer.Option(min=0, help="Between the workers, where seconds are modelled.")]
ResumeOption = Annotated[
    ResumeMode,
    typer.Option(
        "--resume", metavar="[auto]", help="Go on from the newest checkpoint; auto: if any.", show_default=False
    ),
]
StepSeconds = Annotated[
    float | None, typer.Option(min=1e-6, help="Of an inner step, as `profile` measures it.", show_default=False)
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="MODULE", help="Code that the configuration may name.", show_default=False),
]


@contextmanager
def _importing() -> Iterator[None]:
    """Put off garbage collection while modules are imported: it would take a tenth of the time and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    """Run the program. An error is one line.

    Exit codes: 0 for what is finished, 1 for what failed, 2 for what the user can mend, 75 for what was stopped and is
    to be continued, 130 for what Ctrl-C ended at once.
    """
    # Workers share the cores: threads that spin while they wait would slow all of them down, many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is our own line, not a C++ stack trace
    if not sys.flags.safe_path:
        sys.path.append("")  # the present folder, where parts of one's own are found as by `python -m isthmus`
    log.set_up()
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from isthmus.tools.exit_codes import message_and_code

        message, code = message_and_code(error)
    logging.getLogger("isthmus").error(" ".join(message.split()))
    sys.exit(code)


@app.callback()
def common(
    verbose: Annotated[bool, typer.Option("--verbose", help="Log details, too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
) -> None:
    """Set up the log of this process; `launch` hands the options on to its workers."""
    log.set_up(verbose, quiet)


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each run.")] = 500,
    round_trip_ms: RoundTripMs = 0.0,
) -> None:
    """Train a small model in several ways on this machine and compare them in one table."""
    from isthmus.tools.fork_server import ForkServer

    minutes = max(1, round(_DEMO_STEP_SECONDS * steps / 60))  # said before torch is imported, which takes seconds
    length = "a minute" if minutes == 1 else f"{minutes} minutes"
    print(f"one small language model, trained in several ways on this machine: {length} on two cores", flush=True)
    with ForkServer() as server:  # it imports while this process does
        with _importing():
            from isthmus.tools.demo import run_demo

        run_demo(run_dir, steps, _console(), server, round_trip_ms=round_trip_ms)


@app.command(cls=ResumingCommand)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: ResumeOption = ResumeMode.NO,
    allow: Allow = None,
    follow_stdin: Annotated[bool, typer.Option("--follow-stdin", "--on-leash", hidden=True)] = False,
) -> None:
    """Run one worker: alone, or one rank of it under torchrun."""
    from isthmus.core.imports import allow_imports
    from isthmus.recipes import load_config
    from isthmus.tools.finished_run import FinishedRun
    from isthmus.tools.report import print_report
    from isthmus.tools.workers import follow_stdin as begin_to_follow
    from isthmus.train.worker import train
    from isthmus.transport.rendezvous import follow_srun

    if follow_stdin:
        begin_to_follow()
    follow_srun()
    allow_imports(allow or [])
    loaded = load_config(config, overrides or [], resume=resume is not ResumeMode.NO)
    with _may_be_finished(resume):
        part = train(loaded, resume.mode)
    if not part["finished"]:
        raise typer.Exit(STOPPED)
    if loaded.train.workers == 1 and not follow_stdin:
        print_report(FinishedRun.read(Path(loaded.train.run_dir)), _console())


@app.command(cls=ResumingCommand)
def launch(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    resume: ResumeOption = ResumeMode.NO,
    allow: Allow = None,
    round_trip_ms: RoundTripMs = 0.0,
    hosts: HostNames = None,
    python: HostPython = sys.executable,
    address: HostAddress = None,
) -> None:
    """Run all workers, on this machine or by ssh on others, with live progress and a report."""
    from isthmus.tools.fork_server import ForkServer

    # the fork server imports while this process does
    with open_hosts(hosts, python, address) if hosts else ForkServer() as server:
        with _importing():
            from isthmus.core.imports import allow_imports
            from isthmus.recipes import load_config
            from isthmus.tools.launch import launch as run
            from isthmus.tools.report import print_report
            from isthmus.tools.workers import how_to_resume

            allow_imports(allow or [])
            loaded, console = load_config(config, overrides or [], workers, resume is not ResumeMode.NO), _console()
        with _may_be_finished(resume):
            finished_run = run(loaded, console, server, resume.mode)
    if finished_run:
        print_report(finished_run, console, round_trip_ms)
    else:
        options = "" if isinstance(server, ForkServer) else server.options
        console.print(f"stopped; {how_to_resume(Path(loaded.train.run_dir), options)}", soft_wrap=True)
        raise typer.Exit(STOPPED)


@app.command()
def show(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    allow: Allow = None,
    round_trip_ms: RoundTripMs = 0.0,
    step_seconds: StepSeconds = None,
) -> None:
    """Print the resolved configuration, what each sync sends and takes, where each part is, and what does not fit."""
    with _importing():
        from isthmus.core.imports import allow_imports
        from isthmus.recipes import load_config
        from isthmus.tools.show import show

        allow_imports(allow or [])
        loaded = load_config(config, overrides or [], workers)
    show(loaded, _console(), round_trip_ms, step_seconds)


@app.command()
def profile(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    round_trip_ms: RoundTripMs = 0.0,
) -> None:
    """Measure this machine with a configuration: memory, speed, FLOPs, and what a sync costs."""
    from isthmus.core.imports import allow_imports
    from isthmus.recipes import load_config
    from isthmus.tools.profile import profile as measure
    from isthmus.tools.profile import show_profile

    allow_imports(allow or [])
    measured = measure(load_config(config, overrides or [], workers), round_trip_ms)
    if as_json:
        print(json.dumps(asdict(measured), indent=1))
    else:
        show_profile(measured, _console())


@app.command()
def doctor(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    allow: Allow = None,
    step_seconds: StepSeconds = None,
) -> None:
    """Check machines, links and configuration before a long run; every worker starts it, or --workers N starts them."""
    from isthmus.core.imports import allow_imports
    from isthmus.recipes import load_config
    from isthmus.tools.doctor import doctor as examine
    from isthmus.tools.doctor import doctor_on_this_machine
    from isthmus.transport.rendezvous import follow_srun

    follow_srun()
    allow_imports(allow or [])
    loaded = load_config(config, overrides or [], workers)
    if workers:
        raise typer.Exit(doctor_on_this_machine(loaded, step_seconds))
    raise typer.Exit(examine(loaded, _console(), step_seconds=step_seconds))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    to: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    repo: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="And upload it to the Hub.", show_default=False)
    ] = None,
    allow: Allow = None,
) -> None:
    """Write a trained model as a folder: safetensors, configuration, model card."""
    from isthmus.core.imports import allow_imports
    from isthmus.tools.export import export
    from isthmus.tools.push import hub_token, push

    allow_imports(allow or [])
    token = hub_token() if repo else ""
    step = export(run, to)
    print(f"{to} holds the model after step {step}: model.safetensors, config.json, README.md")
    if repo:
        print(f"uploaded to {push(to, repo, token)}")


for command in (servers.identity, servers.lighthouse, servers.dht, servers.relay):
    app.command()(command)


@contextmanager
def _may_be_finished(resume: ResumeMode) -> Iterator[None]:
    """End well where a run that goes on if it can has nothing left to do."""
    from isthmus.train.resume_check import AlreadyFinished

    try:
        yield
    except AlreadyFinished as finished:
        if resume is not ResumeMode.AUTO:
            raise
        logging.getLogger("isthmus").info(finished)
        raise typer.Exit from finished


def _console() -> Console:
    """Standard output; wide enough for tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)
