"""Runs side by side, as a plot."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from isthmus.tools.finished_run import FinishedRun, modelled_clock

_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7f7f7f", "#8c6d31")


def draw(
    runs: list[FinishedRun],
    path: Path,
    megabits_per_second: float = 100,
    step_seconds: float | None = None,
    round_trip_ms: float = 0.0,
) -> None:
    """Draw the loss of the anchor against tokens, bytes sent and modelled time, as one image.

    Runs that send nothing are left out of the second panel.
    """
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    tokens_panel, bytes_panel, time_panel = figure.subplots(1, 3, sharey=True)
    for run, colour in zip(runs, cycle(_COLOURS), strict=False):
        losses = run.losses()
        loss = list(losses.values())
        style: dict[str, Any] = {"color": colour, "label": run.name, "linewidth": 1.6, "markersize": 3.5}
        per_step = run.summary["tokens_per_worker"] / run.steps
        sent, clock = run.sent_until(), modelled_clock(run, megabits_per_second, step_seconds, round_trip_ms)
        tokens_panel.plot([per_step * step / 1e3 for step in losses], loss, "o-", **style)
        if sent[-1]:
            bytes_panel.plot([sent[step] / 1e6 for step in losses], loss, "o-", **style)
        time_panel.plot([clock[step] for step in losses], loss, "o-", **style)
    tokens_panel.set(xlabel="thousand tokens per worker", ylabel="evaluation loss of the anchor (nats a token)")
    bytes_panel.set(xlabel="MB sent per worker")
    way = f", {round_trip_ms:g} ms" if round_trip_ms else ""
    time_panel.set(xlabel=f"modelled seconds on an uplink of {megabits_per_second:g} Mbit/s{way}")
    for panel in (bytes_panel, time_panel):
        if math.isfinite(panel.dataLim.minposx):  # it shows anything
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=10))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
    for panel in (tokens_panel, bytes_panel, time_panel):
        panel.grid(True, which="major", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    _show_the_end(tokens_panel, [list(losses.values())[-1] for run in runs if (losses := run.losses())])
    figure.legend(*tokens_panel.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)


def _show_the_end(panel: Axes, final: list[float]) -> None:
    """Cut off the beginning of the curves, where all are high, so that their ends can be told apart."""
    if final:
        panel.set_ylim(top=min(panel.get_ylim()[1], max(final) + max(max(final) - min(final), 0.5)))
