"""Runs side by side: rows of figures, a table and a plot. Pure functions of records."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from isthmus.train.modelled import modelled_clock, modelled_utilisation
from isthmus.train.record import Record

LINKS = (10, 100, 1000)  # Mbit/s of the modelled columns
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7f7f7f", "#8c6d31")


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
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
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


def draw(
    records: list[Record], path: Path, megabits_per_second: float = 100, step_seconds: float | None = None
) -> None:
    """Loss of the anchor against tokens, bytes sent and modelled time, as one image.

    Runs that send nothing are left out of the second panel.
    """
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    tokens_panel, bytes_panel, time_panel = figure.subplots(1, 3, sharey=True)
    for record, colour in zip(records, _cycle(len(records)), strict=True):
        losses = {event["step"]: event["loss"] for event in record.of("eval")}
        loss, label = list(losses.values()), record.name
        per_step = record.summary["tokens_per_worker"] / record.steps
        sent, clock = record.sent_until(), modelled_clock(record, megabits_per_second, step_seconds)
        _line(tokens_panel, [per_step * step / 1e3 for step in losses], loss, colour, label)
        if sent[-1]:
            _line(bytes_panel, [sent[step] / 1e6 for step in losses], loss, colour, label)
        _line(time_panel, [clock[step] for step in losses], loss, colour, label)
    tokens_panel.set(xlabel="thousand tokens per worker", ylabel="evaluation loss of the anchor (nats a token)")
    bytes_panel.set(xlabel="MB sent per worker")
    time_panel.set(xlabel=f"modelled seconds on an uplink of {megabits_per_second:g} Mbit/s")
    for panel in (bytes_panel, time_panel):
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=10))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    for panel in (tokens_panel, bytes_panel, time_panel):
        panel.grid(True, which="major", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    _show_the_end(tokens_panel, [record.of("eval") for record in records])
    figure.legend(*tokens_panel.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)


def _show_the_end(panel: Axes, evaluations: list[list[dict[str, Any]]]) -> None:
    """Cut off the beginning of the curves, where all are high, so that their ends can be told apart."""
    final = [events[-1]["loss"] for events in evaluations]
    panel.set_ylim(top=min(panel.get_ylim()[1], max(final) + max(max(final) - min(final), 0.5)))


def _line(panel: Axes, x: list[float], loss: list[float], colour: str, label: str) -> None:
    panel.plot(x, loss, "o-", color=colour, label=label, linewidth=1.6, markersize=3.5)


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]
