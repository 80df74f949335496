"""How far every recipe stays behind all-reduce as the model grows: the same family from 0.13M to 100M parameters.

At every rung `ddp` gets the best learning rate of a small search, with AdamW and with Muon, by its mean loss over all
seeds, and every method its inner optimizer's (the next higher of the search where only a part of the values crosses);
all else are the recipes' defaults, nothing set but H. Each run is one process (`benchmarks/batched.py`), one for each
core at a time; those that are in runs/ladder already are not repeated, so the ladder can be climbed in several
sittings:

    python -m benchmarks.ladder 0.13M --local-steps 30 100 --seeds 0 1 2
    python -m benchmarks.ladder 5M --steps 500                # a shorter run than the rung's
    python -m benchmarks.ladder 5M --adamw-lr 0.003 --muon-lr 0.005  # what a shorter search has found
    python -m benchmarks.ladder 0.13M --batch-size 32 --only muloco
    python -m benchmarks.ladder 25M --local-steps 50          # a GPU's
    python -m benchmarks.ladder --plot                        # all that has been measured, over sizes
    python -m benchmarks.ladder --plot --steps 1500           # at equal length
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch

from benchmarks import batched
from benchmarks.python_text import LARGE, make_large
from benchmarks.results import FOLDER, write

CONFIG = Path(__file__).with_suffix(".yaml")
OUTPUT = Path("runs/ladder")
WORKERS = 4
CORES_A_RUN = 3  # on a GPU: `muloco` at 25M took 42 ms a step on an H200 with 16 cores, alone and as one of five
SPARSE = ("dct_momentum", "dilocox", "sparseloco")  # their recipes have 1.4 times Muon's usual rate
METHODS = {
    "adamw": ("diloco", "opendiloco", "streaming"),
    "muon": ("muloco", "eager", *SPARSE),
}


def fast_precision() -> str:
    """Return bfloat16 where there are instructions for it; elsewhere it takes nine times as long as float32."""
    cpu = torch.cpu.get_capabilities()
    return "bfloat16" if torch.cuda.is_available() or cpu.get("avx512_bf16") or cpu.get("amx_bf16") else "float32"


@dataclass(frozen=True)
class Rung:
    """A size of the model, and what it is trained on."""

    hidden_size: int
    num_layers: int
    sequence_length: int
    batch_size: int  # sequences a worker and step
    steps: int
    adamw: tuple[float, ...]  # the learning rates that are searched for ddp
    muon: tuple[float, ...]
    precision: str = "float32"
    source: str = "stdlib"  # of text; to read it again flatters the methods (`benchmarks/repeated_text.py`)

    @property
    def num_tokens(self) -> int:
        """Of a worker's batch."""
        return self.batch_size * self.sequence_length

    def overrides(self) -> list[str]:
        """Return the settings of a run."""
        heads = max(4, self.hidden_size // 64)
        sizes = f"hidden_size: {self.hidden_size}, num_layers: {self.num_layers}, num_heads: {heads}"
        return [
            f"model={{type: gpt_neox, {sizes}, vocab_size: 256, sequence_length: {self.sequence_length}}}",
            f"data.source={self.source}",
            f"inner.batch_size={self.batch_size}",
            f"inner.precision={self.precision}",
            f"train.steps={self.steps}",
            f"train.eval_every={self.steps // 5}",
        ]


FAST = fast_precision()
RUNGS = {
    "0.13M": Rung(64, 2, 64, 8, 3000, (5e-3, 1e-2, 1.4e-2, 2e-2), (7e-3, 1e-2, 1.4e-2, 2e-2)),
    "0.9M": Rung(128, 4, 64, 8, 1500, (2e-3, 4e-3, 8e-3), (5e-3, 7e-3, 1e-2, 1.4e-2), FAST),
    "5M": Rung(256, 6, 128, 8, 1500, (1.5e-3, 3e-3, 6e-3), (3.5e-3, 5e-3, 7e-3, 1e-2, 1.4e-2), FAST),
    "25M": Rung(512, 8, 256, 16, 1500, (1e-3, 1.5e-3, 2e-3, 3e-3), (3.5e-3, 5e-3, 7e-3, 1e-2, 1.4e-2), FAST, LARGE),
    "100M": Rung(768, 14, 512, 16, 3000, (5e-4, 7e-4, 1e-3), (7e-3, 1e-2, 1.4e-2), FAST, LARGE),
}


@dataclass(frozen=True)
class Run:
    """One run of a rung."""

    rung: str
    recipe: str
    inside: str
    lr: float
    seed: int
    local_steps: int = 0  # 0: none, as in ddp
    workers: int = WORKERS
    more: tuple[str, ...] = ()  # overrides
    shares: batched.Shares | None = None  # of the workers, where they do not read the standard library alike

    @property
    def method(self) -> str:
        """The name of what it shows."""
        return "alone" if self.workers == 1 else self.recipe

    def result(self) -> dict[str, Any]:
        """Train, unless that has been done; return what came of it."""
        name = f"{self.method}-{self.workers}-{self.inside}-{self.lr:g}-H{self.local_steps}-seed{self.seed}"
        data = [] if self.shares is None else [self.shares.name]
        path = OUTPUT / self.rung / ("-".join([name, *data, *self.more]).replace("/", "-") + ".json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(batched.run(CONFIG, self._overrides(), self.shares))))
        outcome = json.loads(path.read_text())
        facts = {"inside": self.inside, "lr": self.lr, "H": self.local_steps, "seed": self.seed}
        return {"method": self.method, **facts, "loss": outcome["loss"], "sent_bytes": outcome["sent_bytes"]}

    def _overrides(self) -> list[str]:
        optimizer = f"inner.optimizer={{type: {self.inside}, lr: {self.lr:.6f}}}"  # YAML reads 1e-2 as a text
        overrides = [*RUNGS[self.rung].overrides(), f"outer.recipe={self.recipe}", f"train.seed={self.seed}", optimizer]
        overrides.append(f"train.workers={self.workers}")
        overrides += [f"outer.schedule.local_steps={self.local_steps}"] if self.local_steps else []
        return [*overrides, *self.more]


class Climb:
    """The runs of one rung, of another length or with another batch where one is given.

    `searched` are learning rates by inner optimizer, where a search is to be narrower than the rung's.
    """

    def __init__(
        self,
        name: str,
        num_steps: int | None = None,
        batch_size: int | None = None,
        searched: dict[str, tuple[float, ...]] | None = None,
    ) -> None:
        rung = RUNGS[name]
        num_steps = other_length(name, num_steps)
        self.name = file_name(name, num_steps, batch_size)
        self.rung = replace(rung, steps=num_steps or rung.steps, batch_size=batch_size or rung.batch_size)
        self._searched = {"adamw": rung.adamw, "muon": rung.muon} | (searched or {})
        length = () if num_steps is None else (f"train.steps={num_steps}", f"train.eval_every={num_steps}")
        self._of_rung, self._more = name, (*length, *([] if batch_size is None else [f"inner.batch_size={batch_size}"]))
        self.results: list[dict[str, Any]] = []

    def _run(self, recipe: str, inside: str, lr: float, seed: int, steps: int = 0, workers: int = WORKERS) -> Run:
        return Run(self._of_rung, recipe, inside, lr, seed, steps, workers, self._more)

    def measure(self, local_steps: list[int], seeds: list[int], only: list[str]) -> None:
        """Search the baselines' rates, then run every method, or only some."""
        if self.rung.source == LARGE:
            make_large()
        methods_by_inside = {
            inside: chosen
            for inside, methods in METHODS.items()
            if (chosen := [method for method in methods if not only or method in only])
        }
        search = [(inside, lr, seed) for inside in methods_by_inside for lr in self._searched[inside] for seed in seeds]
        self.results += run_all([self._run("ddp", *each) for each in search])
        plan = list[Run]()
        for inside, methods in methods_by_inside.items():
            lr = best_lr(self.results, inside)
            for seed in seeds:
                plan.append(self._run("ddp", inside, lr, seed, workers=1))
                for method in methods:
                    own_lr = self._next_lr(inside, lr) if method in SPARSE else lr
                    plan += [self._run(method, inside, own_lr, seed, steps) for steps in local_steps]
        self.results += run_all(plan)

    def _next_lr(self, inside: str, lr: float) -> float:
        rates = getattr(self.rung, inside)
        return min((each for each in rates if each > lr), default=max(rates))


def run_all(plan: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what came of runs, as many of them at once as there are cores, or fewer where they share a GPU."""
    num_cores, results = os.cpu_count() or 1, []
    at_once = max(1, num_cores // CORES_A_RUN) if torch.cuda.is_available() else num_cores
    with multiprocessing.get_context("spawn").Pool(at_once, maxtasksperchild=1) as pool:
        for result in pool.imap(_result, plan):
            results.append(result)
            print(" ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    return results


def _result(run: Any) -> dict[str, Any]:
    result: dict[str, Any] = run.result()
    return result


def best_lr(results: list[dict[str, Any]], inside: str) -> float:
    """Return the learning rate with which `ddp` ends lowest, the mean over seeds."""
    losses: dict[float, list[float]] = {}
    for result in results:
        if (result["method"], result["inside"]) == ("ddp", inside):
            losses.setdefault(result["lr"], []).append(result["loss"])
    most = max(map(len, losses.values()))  # former results have other seeds of the best one alone
    return min((lr for lr in losses if len(losses[lr]) == most), key=lambda lr: statistics.mean(losses[lr]))


def gaps(results: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[float]]:
    """Return, by method, inner optimizer and H, how far each seed ends above `ddp` with the same inside, in percent.

    Of `ddp` that is the best learning rate's, seed by seed.
    """
    rates = {inside: best_lr(results, inside) for inside in {result["inside"] for result in results}}
    reference = {
        (r["inside"], r["seed"]): r["loss"] for r in results if r["method"] == "ddp" and r["lr"] == rates[r["inside"]]
    }
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for r in results:
        if r["method"] != "ddp":
            key, base = (r["method"], r["inside"], r["H"]), reference[r["inside"], r["seed"]]
            found.setdefault(key, {})[r["seed"]] = 100 * (r["loss"] / base - 1)
    return {key: list(by_seed.values()) for key, by_seed in found.items()}


def report(climb: Climb) -> None:
    """Write the table of a rung."""
    rows = []
    sent = {(r["method"], r["inside"], r["H"]): r["sent_bytes"] for r in climb.results}
    rates = {(r["method"], r["inside"], r["H"]): r["lr"] for r in climb.results}  # of all seeds the same
    for (method, inside, steps), percents in gaps(climb.results).items():
        spread = f"{min(percents):+.2f} to {max(percents):+.2f}" if len(percents) > 1 else "-"
        key = (method, inside, steps)
        diloco = sent.get(("diloco", "adamw", steps), 0)
        times = f"{diloco / sent[key]:.1f}" if diloco and sent[key] else "-"
        cells = [f"{rates[key]:g}", f"{statistics.mean(percents):+.2f} %", spread]
        rows.append([method, inside, steps or "-", *cells, f"{sent[key] / 1e6:.1f}", times])
    columns = ["method", "inside", "H", "lr", "mean gap to ddp", "by seed, %", "MB sent", "times fewer than diloco"]
    found: dict[str, list[float]] = {}
    for r in climb.results:
        if r["method"] == "ddp":
            found.setdefault(f"{r['inside']} {r['lr']:g}", []).append(r["loss"])
    tried = ", ".join(f"{name}: {statistics.mean(losses):.4f}" for name, losses in found.items())
    notes = [f"{climb.rung}", f"{WORKERS} workers; the recipes' defaults but for H", f"ddp, mean over seeds: {tried}"]
    print(write(f"ladder-{climb.name}", f"The ladder at {climb.name}", columns, rows, notes, climb.results))


def file_name(rung: str, num_steps: int | None, batch_size: int | None = None) -> str:
    """Return what results of a rung are called, behind `ladder-`."""
    parts = [f"{batch_size}-sequences"] if batch_size else []
    return "-".join([rung, *parts, *([f"{num_steps}-steps"] if other_length(rung, num_steps) else [])])


def other_length(rung: str, num_steps: int | None) -> int | None:
    """Return `num_steps` where a run of so many is not the rung's own."""
    return None if num_steps == RUNGS[rung].steps else num_steps


def plot(path: Path, num_steps: int | None) -> None:
    """Draw the gap to `ddp` over the size, a line a method, from the newest result at every rung, of equal length.

    Bars reach from the lowest to the highest seed. H has a panel where several sizes have been measured with it.
    """
    sizes, lines = list(RUNGS), dict[tuple[str, int], dict[str, list[float]]]()
    for name in sizes:
        newest = max(FOLDER.glob(f"*-ladder-{file_name(name, num_steps)}.json"), default=None)
        results = [] if newest is None else json.loads(newest.read_text())["results"]
        for (method, _, steps), percents in gaps(results).items():
            if method != "alone":
                lines.setdefault((method, steps), {})[name] = percents
    sizes = [name for name in sizes if any(name in own for own in lines.values())]
    labels = [f"{name}\n{num_steps or RUNGS[name].steps} steps\nof {RUNGS[name].num_tokens:,}" for name in sizes]
    sizes_by_steps: dict[int, set[str]] = {}
    for (_, steps), own in lines.items():
        sizes_by_steps.setdefault(steps, set()).update(own)
    all_steps = sorted(steps for steps, own in sizes_by_steps.items() if len(own) > 1)
    figure, panels = plt.subplots(1, len(all_steps), figsize=(5.6 * len(all_steps), 4.5), sharey=True, squeeze=False)
    for axes, steps in zip(panels[0], all_steps, strict=True):
        methods = {method: own for (method, h), own in lines.items() if h == steps}
        for number, (method, own) in enumerate(methods.items()):
            means = [statistics.mean(percents) for percents in own.values()]
            below = [mean - min(percents) for mean, percents in zip(means, own.values(), strict=True)]
            above = [max(percents) - mean for mean, percents in zip(means, own.values(), strict=True)]
            places = [sizes.index(name) + (number - len(methods) / 2) / 40 for name in own]  # side by side
            marker = "os^vD*PX"[number % 8]
            axes.errorbar(places, means, [below, above], marker=marker, linewidth=1, elinewidth=0.7, label=method)
        axes.set(
            title=f"H = {steps}",
            xticks=range(len(sizes)),
            xticklabels=labels,
            xlabel="parameters; tokens a worker and step",
        )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("evaluation loss above ddp, %")
    panels[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Climb one rung, or draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", nargs="?", choices=RUNGS)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="inner steps; the rung's when not given")
    parser.add_argument("--batch-size", type=int, help="sequences a worker and step; the rung's when not given")
    for inside in METHODS:
        parser.add_argument(f"--{inside}-lr", type=float, nargs="+", help="rates to try for ddp, not the rung's")
    parser.add_argument("--only", nargs="*", default=[], help="methods; all when not given")
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    if arguments.rung:
        given = {inside: getattr(arguments, f"{inside}_lr") for inside in METHODS}
        searched = {inside: tuple(rates) for inside, rates in given.items() if rates}
        climb = Climb(arguments.rung, arguments.steps, arguments.batch_size, searched)
        climb.measure(arguments.local_steps, arguments.seeds, arguments.only)
        report(climb)
    if arguments.plot:
        plot(FOLDER / f"ladder{'' if arguments.steps is None else f'-{arguments.steps}-steps'}.png", arguments.steps)


if __name__ == "__main__":
    main()
