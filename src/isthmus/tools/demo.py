"""The demo: one small model trained in several ways on this machine, compared in one table.

It is short, and one seed: docs/learning.md has the same methods over three seeds, in runs that are six times as long.
`sparseloco` is left out because it is ahead of `diloco` after so few steps, and not at the end.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.core.cores import num_cores
from isthmus.recipes import load_config
from isthmus.tools.finished_run import FinishedRun
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.launch import Interrupted, launch
from isthmus.tools.report import compare, make_table
from isthmus.train.run_folder import make_run_dir

BASE = Path(__file__).with_name("demo.yaml")
WORKERS = 4
_PLOT_LINK = 100  # Mbit/s


@dataclass(frozen=True)
class DemoRun:
    """One run of the demo."""

    name: str
    recipe: str
    what: str  # for people who see it for the first time
    workers: int = WORKERS
    overrides: tuple[str, ...] = ()

    def configure(self, steps: int, folder: Path) -> RunConfig:
        """Return the whole configuration of the run."""
        common = [f"outer.recipe={self.recipe}", f"train.steps={steps}", f"train.run_dir={folder / self.name}"]
        return load_config(BASE, [*common, *self.overrides], self.workers)


_ADAMW = "inner.optimizer={type: adamw, lr: 1.0e-2}"  # the best for ddp; Muon has its recipe's own
_EVERY_20 = "outer.schedule.local_steps=20"  # H: short enough for a few hundred steps
RUNS = (
    DemoRun("alone", "ddp", "one worker, which sends nothing", workers=1, overrides=(_ADAMW,)),
    DemoRun("ddp", "ddp", "gradients are averaged at every step", overrides=(_ADAMW,)),
    DemoRun("diloco", "diloco", "weights are averaged every 20 steps", overrides=(_ADAMW, _EVERY_20)),
    DemoRun(
        "streaming",
        "streaming",
        "a part of them at a time, in 4 bits, while training goes on",
        overrides=(_ADAMW, _EVERY_20),
    ),
    DemoRun("muloco", "muloco", "Muon as inner optimizer, and 2 bits a value", overrides=(_EVERY_20,)),
)


def run_demo(
    folder: Path,
    steps: int,
    console: Console,
    server: ForkServer,
    runs: tuple[DemoRun, ...] = RUNS,
    round_trip_ms: float = 0.0,
) -> None:
    """Run all of them, then write `summary.json` and `report.png` into `folder` and print the table.

    The links of what is modelled there have this round trip.

    Raises:
        UserError: `folder` holds something that is no demo.
        Interrupted: stopped before the end.
    """
    _clear(folder, console)
    begin, finished = time.monotonic(), list[FinishedRun]()
    for number, run in enumerate(runs, 1):
        console.rule(f"{number} of {len(runs)}: {run.name}: {run.what}", align="left")
        finished_run = launch(run.configure(steps, folder), console, server, name=run.name)
        if finished_run is None:
            raise Interrupted(f"the demo was stopped during {run.name}; what was finished before is in {folder}")
        finished.append(finished_run)
    step_seconds = finished[0].step_seconds
    rows = compare(finished, step_seconds, round_trip_ms)
    notes = _notes(finished, step_seconds, round_trip_ms)
    # what is per worker in a run's summary is a mean in its row
    joined = {run.name: {**run.summary, "row": row} for run, row in zip(finished, rows, strict=True)}
    summary = {"steps": steps, "step_seconds": step_seconds, "notes": notes, "runs": joined}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    from isthmus.tools.plot import draw  # matplotlib takes a second to import

    draw(finished, folder / "report.png", _PLOT_LINK, step_seconds, round_trip_ms)
    console.rule(align="left")
    console.print(make_table(rows))
    for note in notes:
        console.print(f"- {note}")
    minutes, seconds = divmod(round(time.monotonic() - begin), 60)
    console.print(f"\n{minutes} min {seconds} s. In {folder}: report.png, summary.json, one folder a run.")


def _clear(folder: Path, console: Console) -> None:
    """Make room for a new demo; an older one is replaced, anything else is left alone."""
    mark = folder / BASE.name
    if mark.exists():
        console.print(f"{folder} holds an older demo: it is replaced")
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} holds something that is not a demo: choose another --run-dir")
    make_run_dir(folder, "--run-dir")
    shutil.copy(BASE, mark)


def _notes(finished: list[FinishedRun], step_seconds: float, round_trip_ms: float) -> list[str]:
    alone = finished[0].summary
    return [
        f"All runs: {alone['num_parameters']:,} parameters, {alone['steps']} steps, {alone['tokens_per_worker']:,} "
        f"tokens per worker; {WORKERS} workers share {num_cores()} cores here, so computing is slower than alone.",
        "alone: one worker on its own part of the data, without the others and without communication.",
        f"Inner optimizer: {_inner_optimizers(finished)}.",
        "eval loss: nats a token on validation text; of the anchor (the parameters as of the last sync, equal on all "
        "workers), where there is one.",
        "One run this short is worth up to 2 %: which of diloco and streaming is ahead depends on the seed "
        "(docs/learning.md).",
        "hidden: seconds of syncs during which training went on.",
        "modelled: share of the time spent computing, if every worker had a machine like this one for itself "
        f"({step_seconds:.3f} s a step, as measured alone) and an uplink of that speed"
        + (f" with a round trip of {round_trip_ms:g} ms" if round_trip_ms else "")
        + "; bytes as counted.",
    ]


def _inner_optimizers(finished: list[FinishedRun]) -> str:
    """Return which runs have which inner optimizer: 'adamw in alone, ddp; muon in muloco'."""
    users: dict[str, list[str]] = {}
    for run in finished:
        users.setdefault(run.config["inner"]["optimizer"]["type"], []).append(run.name)
    return "; ".join(f"{optimizer} in {', '.join(names)}" for optimizer, names in users.items())
