"""Runs side by side: rows of figures and a table. Pure functions of records."""

from __future__ import annotations

from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from isthmus.tools.modelled import modelled_utilisation
from isthmus.tools.record import Record

LINKS = (10, 100, 1000)  # Mbit/s of the modelled columns


def compare(records: list[Record], step_seconds: float | None = None) -> list[dict[str, Any]]:
    """One row of figures a run: what was measured, per worker, and modelled utilisation.

    Args:
        records: the runs; the bytes of a `ddp` run with several workers, if there is one, are the measure for the rest.
        step_seconds: computing per inner step on an uncontended machine, for modelling; None: as measured in each run.
    """
    baseline = next((r.sent_bytes for r in records if r.summary["recipe"] == "ddp" and r.sent_bytes), None)
    return [
        {
            "run": record.name,
            "eval_loss": record.summary["eval_loss"],
            "sent_bytes": record.sent_bytes,
            "times_fewer_than_ddp": baseline / record.sent_bytes if baseline and record.sent_bytes else None,
            "compute_seconds": mean(record.summary["compute_seconds"]),
            "sync_seconds": mean(record.summary["sync_seconds"]),
            "hidden_seconds": mean(record.summary["hidden_seconds"]),
            "modelled_utilisation": {str(link): modelled_utilisation(record, link, step_seconds) for link in LINKS},
        }
        for record in records
    ]


def make_table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `compare`, for people."""
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
            f"{row['eval_loss']:.3f}",
            readable_bytes(row["sent_bytes"]),
            f"{fewer:,.1f}" if fewer else "-",
            *(f"{row[name]:.1f}" for name in ("compute_seconds", "sync_seconds", "hidden_seconds")),
            *(f"{share:.1%}" for share in row["modelled_utilisation"].values()),
        )
    return table


def readable_bytes(count: float) -> str:
    """'38.1 MB'."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
