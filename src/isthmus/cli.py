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
from typing import Annotated, Any

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup
from typing_extensions import override

from isthmus import log
from isthmus.tools import servers

_DEMO_STEP_SECONDS = 0.2  # of all runs, one step each, on two cores

# Commands import their parts themselves: torch takes seconds, and `--help` needs none of it.


class _Commands(TyperGroup):
    """The commands, with options that may stand before or behind any of them."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        common = [arg for arg in args if arg in ("--verbose", "--quiet")]
        return super().parse_args(ctx, common + [arg for arg in args if arg not in common])


app = typer.Typer(
    cls=_Commands,
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
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")]
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
    """Run the program. An error is one line; exit code 2 for what the user can mend, 1 for what failed."""
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


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
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

    if follow_stdin:
        begin_to_follow()
    allow_imports(allow or [])
    loaded = load_config(config, overrides or [], resume=resume)
    part = train(loaded, resume)
    if part["finished"] and loaded.train.workers == 1 and not follow_stdin:
        print_report(FinishedRun.read(Path(loaded.train.run_dir)), _console())


@app.command()
def launch(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    resume: Resume = False,
    allow: Allow = None,
    round_trip_ms: RoundTripMs = 0.0,
) -> None:
    """Run all workers on this machine, with live progress and a report."""
    from isthmus.tools.fork_server import ForkServer

    with ForkServer() as server:  # it imports while this process does
        with _importing():
            from isthmus.core.imports import allow_imports
            from isthmus.recipes import load_config
            from isthmus.tools.launch import launch as run
            from isthmus.tools.report import print_report
            from isthmus.tools.workers import how_to_resume

            allow_imports(allow or [])
            loaded, console = load_config(config, overrides or [], workers, resume), _console()
        finished_run = run(loaded, console, server, resume)
    if finished_run:
        print_report(finished_run, console, round_trip_ms)
    else:
        console.print(f"stopped; {how_to_resume(Path(loaded.train.run_dir))}", soft_wrap=True)


@app.command()
def show(
    config: ConfigPath,
    workers: NumWorkers = None,
    overrides: Overrides = None,
    allow: Allow = None,
    round_trip_ms: RoundTripMs = 0.0,
) -> None:
    """Print the resolved configuration, what each sync sends and takes, where each part is, and what does not fit."""
    with _importing():
        from isthmus.config import dump
        from isthmus.core.imports import allow_imports
        from isthmus.recipes import load_config
        from isthmus.tools.preflight import check_run, import_paths
        from isthmus.tools.report import LINKS, readable_bytes
        from isthmus.tools.sync_traffic import Uplink, readable_seconds, sync_traffic

        allow_imports(allow or [])
        loaded, console = load_config(config, overrides or [], workers), _console()
    print(yaml.safe_dump(dump(loaded), sort_keys=False))
    table = Table("fragment (synced together)", box=SIMPLE_HEAD)
    for column in ("sent", "bytes", "trips", *(f"modelled at\n{link:,} Mbit/s" for link in LINKS)):
        table.add_column(column, justify="right")
    for fragment, traffic in sync_traffic(loaded).items():
        modelled = [readable_seconds(Uplink(link, round_trip_ms).seconds(traffic)) for link in LINKS]
        sent = traffic.sent_bytes
        table.add_row(fragment, readable_bytes(sent), f"{sent:,}", str(traffic.num_trips), *modelled)
    console.print(table)
    console.print(
        f"per sync, by each of {loaded.train.workers} workers; trips: one-way, one after the other; "
        f"round trip, modelled: {round_trip_ms:g} ms"
    )
    if loaded.train.workers == 1:
        console.print("one worker alone sends nothing: --workers 2 shows what two would send")
    table = Table("part", "import path", box=SIMPLE_HEAD)
    for part, path in import_paths(loaded).items():
        table.add_row(part, path)
    console.print(table)
    check_run(loaded)


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
    step_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Of an inner step, as `profile` measures it.", show_default=False)
    ] = None,
) -> None:
    """Check machines, links and configuration before a long run; every worker starts it, or --workers N starts them."""
    from isthmus.core.imports import allow_imports
    from isthmus.recipes import load_config
    from isthmus.tools.doctor import doctor as examine
    from isthmus.tools.doctor import doctor_on_this_machine

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


def _console() -> Console:
    """Standard output; wide enough for tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)
