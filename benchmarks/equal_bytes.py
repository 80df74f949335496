"""Which method to take at which budget: loss over the bytes that a worker sends, for methods and densities.

Every recipe at several H, and those that send a part of the values at several parts; the inner optimizer's rate is
`questions.LRS`, all else are the recipes' defaults. Runs that are in runs/ladder already are not run again:

    python -m benchmarks.equal_bytes --rung 0.9M --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ladder
from benchmarks.questions import LRS, METHODS, STEPS, make_base, make_run
from benchmarks.results import write
from isthmus.models import outline
from isthmus.recipes import load_config
from isthmus.tools import sent_in_run
from isthmus.tools.sent_in_run import MeasuredMethod, MeasuredMethods
from isthmus.train.assemble import build_model_spec

ALL_LOCAL_STEPS = (10, 30, 100)
DENSITIES = {  # the setting, and its values beside the default
    "sparseloco": ("outer.compressor.compressor.keep", (64, 128, 512)),
    "dilocox": ("outer.compressor.compressor.rank", (0.063, 0.125, 0.5)),
    "dct_momentum": ("outer.compressor.compressor.codec.keep", (256, 512, 1536)),
}


@dataclass(frozen=True)
class Point:
    """A method with one H and one density."""

    recipe: str
    local_steps: int
    density: str  # "" where it is the recipe's own
    run: ladder.Run


@dataclass(frozen=True)
class Measured:
    """What came of a point, over seeds."""

    point: Point
    megabytes: float  # sent by a worker in the whole run
    losses: list[float]  # by seed
    percents: list[float]  # above `ddp` with the same inner optimizer and seed

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.losses)

    @property
    def percent(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.percents)


def points(rung: str) -> Iterator[Point]:
    """Yield all points of a rung."""
    for recipe in METHODS:
        for local_steps in ALL_LOCAL_STEPS:
            yield Point(recipe, local_steps, "", make_run(rung, recipe, local_steps))
    for recipe, (setting, values) in DENSITIES.items():
        for value in values:
            yield Point(recipe, 30, f"{value:g}", make_run(rung, recipe, 30, f"{setting}={value}"))


def measure(rung: str, seeds: list[int]) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Run every point with every seed; return what came of them, and all results."""
    todo = list(points(rung))
    pairs = {(point, seed): replace(point.run, seed=seed) for point in todo for seed in seeds}
    plan = dict.fromkeys(run for own in pairs.values() for run in (make_base(own), own))
    found = dict(zip(plan, ladder.run_all(plan), strict=True))
    measured = []
    for point in todo:
        runs = [pairs[point, seed] for seed in seeds]
        losses = [found[run]["loss"] for run in runs]
        percents = [100 * (loss / found[make_base(run)]["loss"] - 1) for loss, run in zip(losses, runs, strict=True)]
        measured.append(Measured(point, found[runs[0]]["sent_bytes"] / 1e6, losses, percents))
    return measured, list(found.values())


def is_best(one: Measured, measured: list[Measured]) -> bool:
    """Whether no other point sends less and ends lower."""
    return not any(each.megabytes < one.megabytes and each.loss <= one.loss for each in measured)


def adopt(measured: list[Measured], rung: str, seeds: list[int]) -> None:
    """Have `isthmus show` say where a run lies among what was measured."""
    config = load_config(ladder.CONFIG, ladder.RUNGS[rung].overrides())
    num_params = sum(param.numel() for param in outline(build_model_spec(config)).parameters())
    methods = [
        MeasuredMethod(
            recipe=each.point.recipe,
            local_steps=each.point.local_steps,
            inside=each.point.run.inside,
            setting=each.point.density and f"{DENSITIES[each.point.recipe][0].split('.')[-1]} {each.point.density}",
            bits=float(f"{8e6 * each.megabytes / (num_params * STEPS):.3g}"),
            loss=round(each.loss, 4),
            percent=round(each.percent, 2),
        )
        for each in measured
    ]
    about = f"{rung} parameters, {STEPS:,} steps, {ladder.WORKERS} workers, seeds {', '.join(map(str, seeds))}"
    conditions = f"{about}, {date.today()}"
    found = MeasuredMethods(conditions=conditions, methods=tuple(methods))
    text = yaml.safe_dump(found.model_dump(exclude_defaults=True, mode="json"), sort_keys=False)
    Path(sent_in_run.__file__).with_name(sent_in_run.MEASURED).write_text(text)


def plot(path: Path, measured: list[Measured], results: list[dict[str, Any]], rung: str) -> None:
    """Draw losses over bytes: a line a method over H, open marks for other densities, bars from seed to seed."""
    figure, axes = plt.subplots(figsize=(7.5, 5))
    for inside, dashes in (("adamw", "--"), ("muon", ":")):
        own_ddp = [result["loss"] for result in results if result["method"] == "ddp" and result["inside"] == inside]
        axes.axhline(statistics.mean(own_ddp), color="black", linestyle=dashes, label=f"ddp, {inside}")
    for number, recipe in enumerate(METHODS):
        mark, color = "os^vD*PX"[number % 8], f"C{number}"
        for is_default in (True, False):
            own = sorted(
                (each for each in measured if each.point.recipe == recipe and (each.point.density == "") == is_default),
                key=lambda each: each.megabytes,
            )
            if not own:
                continue
            means = [each.loss for each in own]
            below = [mean - min(each.losses) for mean, each in zip(means, own, strict=True)]
            above = [max(each.losses) - mean for mean, each in zip(means, own, strict=True)]
            axes.errorbar(
                [each.megabytes for each in own],
                means,
                yerr=[below, above],
                marker=mark,
                color=color,
                linestyle="-" if is_default else "none",
                markerfacecolor=color if is_default else "none",
                label=recipe if is_default else None,
            )
    axes.set(xscale="log", xlabel="MB sent by a worker in the whole run", ylabel="evaluation loss, nats a byte")
    axes.set_title(f"{rung} parameters, {STEPS} steps, H = {', '.join(map(str, ALL_LOCAL_STEPS))}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, write the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=LRS["adamw"], default="0.13M")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--adopt", action="store_true", help="have isthmus show tell of it")
    arguments = parser.parse_args()
    measured, results = measure(arguments.rung, arguments.seeds)
    rows = []
    for each in sorted(measured, key=lambda each: each.megabytes):
        spread = f"{min(each.percents):+.2f} to {max(each.percents):+.2f}" if len(each.percents) > 1 else "-"
        mean, best = f"{each.percent:+.2f} %", "yes" if is_best(each, measured) else ""
        point = each.point
        about = [point.recipe, point.local_steps, point.density]
        rows.append([*about, f"{each.megabytes:.2f}", f"{each.loss:.4f}", mean, spread, best])
    columns = ["recipe", "H", "density", "MB sent", "loss", "gap to ddp", "by seed, %", "nothing smaller is lower"]
    notes = [
        f"{ladder.RUNGS[arguments.rung]}",
        f"but {STEPS} steps; seeds {arguments.seeds}",
        "the gap is to ddp with the same inner optimizer: AdamW in diloco, opendiloco, streaming, else Muon",
    ]
    title = f"Equal bytes, {arguments.rung} parameters"
    path = write(f"equal-bytes-{arguments.rung}", title, columns, rows, notes, results)
    print(path)
    plot(path.with_name(path.name.removesuffix("md") + "png"), measured, results, arguments.rung)
    if arguments.adopt:
        adopt(measured, arguments.rung, arguments.seeds)


if __name__ == "__main__":
    main()
