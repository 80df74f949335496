"""Questions that the recipes' rules rest on, each answered by runs side by side at a rung of the ladder.

Each case is compared with `ddp`, or one worker alone, of the same inner optimizer, batch and data. Runs are processes
of their own, one for each core at a time (`benchmarks/batched.py`); what is in runs/ladder already is not run again:

    python -m benchmarks.questions start --seeds 0 1 2
    python -m benchmarks.questions workers
    python -m benchmarks.questions workers --plot    # the newest table of it
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import domains, ladder
from benchmarks.batched import Amounts, Domains
from benchmarks.results import FOLDER, write
from isthmus.recipes import RECIPES, Plan

STEPS = 1000
METHODS = [name for methods in ladder.METHODS.values() for name in methods]
_OF_START = ("warm_start_steps", "warm_start_every", "warm_start_lr")
LRS = {
    "adamw": {"0.13M": 1e-2, "0.9M": 4e-3, "5M": 3e-3},
    "muon": {"0.13M": 1e-2, "0.9M": 7e-3, "5M": 5e-3},
    "sparse": {"0.13M": 1.4e-2, "0.9M": 1e-2, "5M": 7e-3},  # Muon's in `ladder.SPARSE`, the ladder's
}


@dataclass(frozen=True)
class Case:
    """A run, what a table calls it, and the run that it is compared with."""

    labels: tuple[str, ...]
    run: ladder.Run
    base: ladder.Run


@dataclass(frozen=True)
class Question:
    """Cases of one table."""

    title: str
    columns: tuple[str, ...]  # of the labels
    cases: Callable[[str], Iterator[Case]]  # of a rung
    num_line_labels: int = 1  # the first labels name a line of the plot, the others lie on its axis
    base: str = "ddp"  # what they are compared with


def make_run(rung: str, recipe: str, local_steps: int, *more: str, workers: int = ladder.WORKERS) -> ladder.Run:
    """Return a run of a recipe with its usual inner optimizer, and one thousand steps."""
    inside = next(name for name, recipes in ladder.METHODS.items() if recipe in recipes)
    lr = LRS["sparse" if recipe in ladder.SPARSE else inside][rung]
    settings = (f"train.steps={STEPS}", f"train.eval_every={STEPS}", *more)
    return ladder.Run(rung, recipe, inside, lr, 0, local_steps, workers, settings)


def make_base(run: ladder.Run) -> ladder.Run:
    """Return the run of `ddp` with the same inner optimizer, and the rung's batch for each worker."""
    return replace(run, recipe="ddp", lr=LRS[run.inside][run.rung], local_steps=0, more=run.more[:2])


def start(rung: str) -> Iterator[Case]:
    """How long is the synchronous start?"""
    for recipe in ("diloco", "muloco"):
        for steps in (0, STEPS // 4, STEPS // 2, 3 * STEPS // 4):
            run = make_run(rung, recipe, 30, f"outer.schedule.warm_start_steps={steps}")
            yield Case((recipe, str(steps)), run, make_base(run))


def workers(rung: str) -> Iterator[Case]:
    """When does another worker stop helping, at a fixed batch of all and at a fixed batch of each?"""
    of_all = ladder.WORKERS * ladder.RUNGS[rung].batch_size
    for recipe in ("diloco", "muloco"):
        for local_steps in (10, 100):
            for number in (2, 4, 8, 16, 32):
                batch = f"inner.batch_size={of_all // number}"
                run = make_run(rung, recipe, local_steps, batch, workers=number)
                base = replace(make_base(run), workers=ladder.WORKERS)
                yield Case((recipe, str(local_steps), "of all", str(number)), run, base)
        for number in (2, 4, 8, 16):
            run = make_run(rung, recipe, 30, workers=number)
            yield Case((recipe, "30", "of each", str(number)), run, make_base(run))


def momentum(rung: str) -> Iterator[Case]:
    """Which momentum suits which H?"""
    for recipe in ("diloco", "muloco"):
        for local_steps in (5, 10, 30, 100):
            for value in (0.4, 0.6, 0.8, 0.9):
                run = make_run(rung, recipe, local_steps, f"outer.optimizer.momentum={value}")
                yield Case((recipe, str(local_steps), str(value)), run, make_base(run))


def outer_lr(rung: str) -> Iterator[Case]:
    """Which outer learning rate suits how many workers, with 8 sequences for each?"""
    for number in (2, 4, 16):
        for value in (0.4, 0.6, 0.8, 1.0):
            run = make_run(rung, "diloco", 30, f"outer.optimizer.lr={value}", workers=number)
            yield Case((str(number), str(value)), run, make_base(run))


def unequal(rung: str) -> Iterator[Case]:
    """What does it cost that every worker has texts of its own kind?"""
    sources = domains.make()
    for recipe in METHODS:
        for dealt in (True, False):
            run = replace(make_run(rung, recipe, 30), shares=Domains(sources, dealt))
            base = replace(make_base(run), shares=Domains(sources, dealt=True))
            yield Case((recipe, "equal shares" if dealt else "a kind each"), run, base)


def amounts(rung: str) -> Iterator[Case]:
    """What does it cost that workers read 8, 4, 2 and 2 sequences a step, not 4 each?"""
    rows = (8, 4, 2, 2)
    shares = {
        ("4 each", "equal"): None,
        ("8, 4, 2, 2", "equal"): Amounts(rows, weighted=False),
        ("8, 4, 2, 2", "by tokens"): Amounts(rows, weighted=True),
    }
    for recipe in METHODS:
        run = make_run(rung, recipe, 30, f"inner.batch_size={sum(rows) // len(rows)}")
        base = replace(make_base(run), more=run.more)
        for labels, own in shares.items():
            yield Case((recipe, *labels), replace(run, shares=own), base)


def alone(rung: str) -> Iterator[Case]:
    """Is a recipe ever worse than one worker alone with its inner optimizer?"""
    for recipe in METHODS:
        for local_steps in (10, 200):
            run = make_run(rung, recipe, local_steps)
            yield Case((recipe, str(local_steps)), run, replace(make_base(run), workers=1))


def adamw(rung: str) -> Iterator[Case]:
    """What do recipes that have Muon inside lose with AdamW in its place, by AdamW's rules and by Muon's?"""
    for recipe in ladder.METHODS["muon"]:
        for local_steps, rules in ((30, "adamw"), (30, "muon"), (100, "adamw")):
            more = _muon_rules(recipe, local_steps) if rules == "muon" else ()
            run = replace(make_run(rung, recipe, local_steps, *more), inside="adamw", lr=LRS["adamw"][rung])
            yield Case((recipe, str(local_steps), rules), run, make_base(run))


def exact(rung: str) -> Iterator[Case]:
    """What would `muloco` gain if nothing it sends were compressed, in the start, in the rounds, in both?"""
    start = {"every": 50, "lr": 1}  # as `diloco` has it
    gradients = [f"outer.schedule.warm_start_{name}={value}" for name, value in start.items()]
    gradients.append("outer.gradient_compressor={type: cast}")
    for local_steps in (30, 100):
        for of_start, start_settings in (("weights", ()), ("gradients", gradients)):
            for of_rounds, round_settings in (("2 bits", ()), ("float32", ("outer.compressor={type: cast}",))):
                run = make_run(rung, "muloco", local_steps, *start_settings, *round_settings)
                yield Case((str(local_steps), of_start, of_rounds), run, make_base(run))


def _muon_rules(recipe: str, local_steps: int) -> tuple[str, ...]:
    """Return what a recipe has by Muon's rules, as overrides."""
    made = RECIPES.get(recipe)(Plan(ladder.WORKERS, STEPS, local_steps, inner_optimizer="muon"))
    schedule, optimizer = made.schedule, made.optimizer
    start = [f"outer.schedule.{name}={getattr(schedule, name)}" for name in _OF_START]
    return (*start, f"outer.optimizer={{{', '.join(f'{key}: {value}' for key, value in optimizer.items())}}}")


QUESTIONS = {
    "start": Question("The synchronous start", ("recipe", "its steps"), start),
    "workers": Question("From 2 to 32 workers", ("recipe", "H", "same batch", "workers"), workers, 3),
    "unequal": Question("Data of four kinds", ("recipe", "of a worker"), unequal),
    "amounts": Question("Different amounts of data", ("recipe", "sequences a step", "weights"), amounts),
    "momentum": Question("The outer momentum", ("recipe", "H", "momentum"), momentum, 2),
    "outer_lr": Question("The outer learning rate", ("workers", "outer learning rate"), outer_lr),
    "alone": Question("Recipes and one worker alone", ("recipe", "H"), alone, base="alone"),
    "adamw": Question("AdamW in the place of Muon", ("recipe", "H", "rules of"), adamw),
    "exact": Question("What compression costs muloco", ("H", "start averages", "weights in"), exact),
}


def make_plan(cases: list[Case], seeds: list[int]) -> list[ladder.Run]:
    """Return the runs of all cases, each once."""
    return list(dict.fromkeys(replace(run, seed=s) for s in seeds for case in cases for run in (case.base, case.run)))


def answer(name: str, rung: str, seeds: list[int]) -> None:
    """Run all cases of a question; write the table."""
    question = QUESTIONS[name]
    cases = list(question.cases(rung))
    plan = make_plan(cases, seeds)
    found = dict(zip(plan, ladder.run_all(plan), strict=True))
    rows = []
    for case in cases:
        own, base = found[replace(case.run, seed=seeds[0])], found[replace(case.base, seed=seeds[0])]
        percents = gaps(case, found)
        spread = f"{min(percents):+.2f} to {max(percents):+.2f}" if len(seeds) > 1 else "-"
        losses = [f"{own['loss']:.4f}", f"{base['loss']:.4f}"]
        rows.append([*case.labels, *losses, f"{statistics.mean(percents):+.2f} %", spread, _megabytes(own)])
    columns = [*question.columns, "loss", question.base, "mean gap", "by seed, %", "MB sent"]
    notes = [f"{ladder.RUNGS[rung]}", f"but {STEPS} steps; seeds {seeds}; losses are the first seed's"]
    print(write(f"{name}-{rung}", f"{question.title}, {rung} parameters", columns, rows, notes, list(found.values())))


def gaps(case: Case, found: dict[ladder.Run, dict[str, Any]]) -> list[float]:
    """Return how far a case ends above what it is compared with, in percent, by seed."""
    own = {run.seed: found[run]["loss"] for run in found if replace(run, seed=0) == case.run}
    return [100 * (loss / found[replace(case.base, seed=seed)]["loss"] - 1) for seed, loss in own.items()]


def plot(name: str, rung: str) -> None:
    """Draw the newest results of a question, beside them: the mean gap of every case, and the seeds' range.

    Raises:
        ValueError: those results are of other cases than today's.
    """
    question, path = QUESTIONS[name], sorted(FOLDER.glob(f"*-{name}-{rung}.json"))[-1]
    cases, results = list(question.cases(rung)), json.loads(path.read_text())["results"]
    plan = make_plan(cases, sorted({each["seed"] for each in results}))
    found = dict(zip(plan, results, strict=True))
    if any((r["method"], r["H"], r["seed"]) != (run.method, run.local_steps, run.seed) for run, r in found.items()):
        raise ValueError(f"{path} has other cases than today's: measure again")
    lines: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        parts = case.labels[: question.num_line_labels], case.labels[question.num_line_labels :]
        line, place = (", ".join(labels) for labels in parts)
        lines.setdefault(line, {})[place] = gaps(case, found)
    places = list(dict.fromkeys(place for own in lines.values() for place in own))
    figure, axes = plt.subplots(figsize=(9, 5))
    for number, (line, own) in enumerate(lines.items()):
        at, means = [places.index(place) for place in own], [statistics.mean(percents) for percents in own.values()]
        ranges = [[mean - min(each), max(each) - mean] for mean, each in zip(means, own.values(), strict=True)]
        axes.errorbar(at, means, [*zip(*ranges, strict=True)], fmt="os^vD*PX"[number % 8] + "-", capsize=3, label=line)
    axes.set(
        xticks=range(len(places)), xticklabels=places, xlabel=", ".join(question.columns[question.num_line_labels :])
    )
    axes.set(ylabel=f"evaluation loss above {question.base}, %", title=f"{question.title}, {rung} parameters")
    axes.grid(alpha=0.3)
    title = ", ".join(question.columns[: question.num_line_labels])
    axes.legend(title=title, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def _megabytes(result: dict[str, Any]) -> str:
    return f"{result['sent_bytes'] / 1e6:.1f}"


def main() -> None:
    """Answer questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=QUESTIONS)
    parser.add_argument("--rung", choices=LRS["adamw"], default="0.13M")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--plot", action="store_true", help="draw what has been measured")
    arguments = parser.parse_args()
    for name in arguments.questions:
        if arguments.plot:
            plot(name, arguments.rung)
        else:
            answer(name, arguments.rung, arguments.seeds)


if __name__ == "__main__":
    main()
