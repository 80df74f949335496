"""Runs side by side: rows of figures and a table. Pure functions of runs."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.tools.finished_run import FinishedRun, modelled_utilisation

LINKS = (10, 100, 1000)  # Mbit/s of the modelled columns


def compare(
    runs: list[FinishedRun], step_seconds: float | None = None, round_trip_ms: float = 0.0
) -> list[dict[str, Any]]:
    """Return one row of figures a run: what was measured, per worker, and the modelled utilisation.

    Args:
        runs: the runs; the bytes of a `ddp` run with several workers, if there is one, are the measure for the rest.
        step_seconds: computing per inner step on an uncontended machine, for modelling; None: as measured in each run.
        round_trip_ms: between the workers, for modelling.
    """
    baseline = next((r.sent_bytes for r in runs if r.summary["recipe"] == "ddp" and r.sent_bytes), None)
    return [
        {
            "run": run.name,
            "eval_loss": run.summary["eval_loss"],
            "sent_bytes": run.sent_bytes,
            "times_fewer_than_ddp": baseline / run.sent_bytes if baseline and run.sent_bytes else None,
            "compute_seconds": mean(run.summary["compute_seconds"]),
            "sync_seconds": mean(run.summary["sync_seconds"]),
            "hidden_seconds": mean(run.summary["hidden_seconds"]),
            "modelled_utilisation": {
                str(link): modelled_utilisation(run, link, step_seconds, round_trip_ms) for link in LINKS
            },
        }
        for run in runs
    ]


def make_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `compare` as a table."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("run", no_wrap=True)
    for header in (
        "eval\nloss",
        "sent by\na worker",
        "times\nfewer\nthan ddp",
        "compute\nseconds",
        "sync\nseconds",
        "of these\nhidden",
        *(f"modelled\nat {link}\nMbit/s" for link in LINKS),
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        fewer = row["times_fewer_than_ddp"]
        table.add_row(
            row["run"],
            "-" if row["eval_loss"] is None else f"{row['eval_loss']:.3f}",
            readable_bytes(row["sent_bytes"]),
            f"{fewer:,.1f}" if fewer else "-",
            *(f"{row[name]:.1f}" for name in ("compute_seconds", "sync_seconds", "hidden_seconds")),
            *(f"{share:.1%}" for share in row["modelled_utilisation"].values()),
        )
    return table


def readable_bytes(count: float) -> str:
    """Return a number of bytes as people read it: '38.1 MB'."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def print_report(finished_run: FinishedRun, console: Console, round_trip_ms: float = 0.0) -> None:
    """Print the table of one run, and draw its plot; what is modelled there has this round trip."""
    from isthmus.tools.plot import draw

    run_dir = Path(finished_run.config["train"]["run_dir"])
    draw([finished_run], run_dir / "report.png", round_trip_ms=round_trip_ms)
    console.print(make_table(compare([finished_run], round_trip_ms=round_trip_ms)))
    console.print(f"more in {run_dir}: summary.json, report.png, metrics, checkpoints", soft_wrap=True)
