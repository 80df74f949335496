"""Evaluation loss of every recipe after equal tokens: 4 workers, real processes, several values of H and seeds.

Each run is an `isthmus launch` of benchmarks/learning.yaml. `alone` is one worker with its own share of the data and no
communication: the same steps and tokens per worker as all others. Runs already in the output folder are not repeated,
so the benchmark can be interrupted and grown:

    python -m benchmarks.learning --seeds 0 1 --local-steps 5 10 30
    python -m benchmarks.learning --name learning-batch-32 --set inner.batch_size=32 train.steps=2000
    python -m benchmarks.learning --name learning-dilocox --local-steps 10 30 --only dilocox "dilocox, replace" \
        "dilocox, eager" "dilocox, keep progress" "dilocox, window 5"
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import runs
from benchmarks.results import circumstances, write
from benchmarks.runs import percent

CONFIG = Path(__file__).with_suffix(".yaml")
OUTPUT = Path("runs")
ADAMW = "inner.optimizer={type: adamw, lr: 1.0e-2}"  # the best of 3e-3, 6e-3, 1e-2 for ddp
_NOTHING_MB = 0.1  # where a logarithmic axis shows it
MUON = "inner.optimizer={type: muon}"
WITHOUT_H: dict[str, tuple[str, ...]] = {
    "alone": ("outer.recipe=ddp", ADAMW),
    "ddp": ("outer.recipe=ddp", ADAMW),
    "alone, muon inside": ("outer.recipe=ddp", MUON),
    "ddp, muon inside": ("outer.recipe=ddp", MUON),
}
WITH_H: dict[str, tuple[str, ...]] = {
    "diloco": ("outer.recipe=diloco", ADAMW),
    "opendiloco": ("outer.recipe=opendiloco", ADAMW),
    "streaming": ("outer.recipe=streaming", ADAMW),
    "muloco": ("outer.recipe=muloco",),
    "eager": ("outer.recipe=eager",),
    "dilocox": ("outer.recipe=dilocox",),
    "dct_momentum": ("outer.recipe=dct_momentum",),
    "sparseloco": ("outer.recipe=sparseloco",),
    "diloco, muon inside": ("outer.recipe=muloco", "outer.compressor={type: cast}"),
}
VARIANTS: dict[str, tuple[str, ...]] = {  # only when asked for by name: what a recipe decides, decided otherwise
    "dilocox, replace": ("outer.recipe=dilocox", "outer.merge={type: replace}", "outer.optimizer.momentum=0.3"),
    "dilocox, eager": ("outer.recipe=dilocox", "outer.merge={type: eager}", "outer.optimizer.momentum=0.3"),
    "dilocox, keep progress": (
        "outer.recipe=dilocox",
        "outer.merge={type: keep_progress}",
        "outer.optimizer.momentum=0.5",
    ),
    "dilocox, window 5": (
        "outer.recipe=dilocox",
        "outer.compressor={type: error_feedback, compressor: "
        "{type: low_rank, rank: 32, window: 5, factors: {type: quantize, bits: 4}}}",
    ),
}


def plan_runs(local_steps: list[int], seeds: list[int], only: list[str]) -> list[tuple[str, int, int, list[str]]]:
    """All (name, H, seed, overrides); H is 0 where there is none."""
    plan = []
    for seed in seeds:
        for name, overrides in WITHOUT_H.items():
            plan.append((name, 0, seed, list(overrides)))
        for steps in local_steps:
            for name, overrides in (WITH_H | {name: VARIANTS[name] for name in only if name in VARIANTS}).items():
                plan.append((name, steps, seed, [*overrides, f"outer.schedule.local_steps={steps}"]))
    return [run for run in plan if not only or run[0] in only]


def launch(output: Path, name: str, local_steps: int, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One run; its summary."""
    folder = output / f"{name.replace(', ', '-').replace(' ', '-')}-H{local_steps}-seed{seed}"
    workers = 1 if name.startswith("alone") else 4
    found = runs.launch(CONFIG, folder, workers, [f"train.seed={seed}", *overrides])
    sent = max(found["sent_bytes"])
    print(f"{name:18} H {local_steps:4} seed {seed}  loss {found['eval_loss']:.4f}  {sent / 1e6:9.2f} MB", flush=True)
    adamw = yaml.safe_load((folder / "config.yaml").read_text())["inner"]["optimizer"]["type"] == "adamw"
    return {"name": name, "adamw": adamw, "H": local_steps, "seed": seed, "sent_bytes": sent, "summary": found}


def table(results: list[dict[str, Any]]) -> list[list[Any]]:
    """A row per method and H: mean loss over seeds, spread, against the references, bytes."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["name"], result["H"]].append(result)
    loss = {key: statistics.mean(r["summary"]["eval_loss"] for r in group) for key, group in groups.items()}
    rows = []
    for (name, steps), group in groups.items():
        losses = [r["summary"]["eval_loss"] for r in group]
        inside = "" if group[0]["adamw"] else ", muon inside"
        sent, diloco = group[0]["sent_bytes"], groups.get(("diloco", steps))
        rows.append(
            [
                name,
                "AdamW" if group[0]["adamw"] else "Muon",
                steps or "-",
                f"{loss[name, steps]:.4f}",
                f"{max(losses) - min(losses):.4f}" if len(losses) > 1 else "-",
                percent(loss[name, steps], loss.get((f"ddp{inside}", 0))),
                percent(loss[name, steps], loss.get((f"alone{inside}", 0))),
                percent(loss[name, steps], loss.get((f"diloco{inside}", steps))),
                percent(loss[name, steps], loss.get(("diloco", steps))),
                f"{sent / 1e6:.2f}",
                f"{diloco[0]['sent_bytes'] / sent:.1f}" if sent and diloco else "-",
            ]
        )
    return rows


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Final loss against bytes sent per worker, a mark per run."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    names = list(dict.fromkeys(result["name"] for result in results))
    for index, name in enumerate(names):
        points = [r for r in results if r["name"] == name]
        sent = [max(r["sent_bytes"] / 1e6, _NOTHING_MB) for r in points]
        losses = [r["summary"]["eval_loss"] for r in points]
        color, marker = plt.get_cmap("tab20")(index), "os^vD*PX<>hpd"[index % 13]
        axes.scatter(sent, losses, label=name, color=color, marker=marker, s=40)
    axes.set(
        xscale="log",
        xlabel=f"megabytes sent per worker (nothing: at {_NOTHING_MB:g})",
        ylabel="evaluation loss of the anchor",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, then write table, data and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[5, 10, 30])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of methods; all when not given")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--name", default="learning", help="of the results and of the folder in runs/")
    arguments = parser.parse_args()
    plan = plan_runs(arguments.local_steps, arguments.seeds, arguments.only)
    results = [
        launch(OUTPUT / arguments.name, name, steps, seed, [*overrides, *arguments.set])
        for name, steps, seed, overrides in plan
    ]
    columns = ["method", "inside", "H", "loss", "spread over seeds", "against ddp", "against alone", "against diloco",
               "against diloco with AdamW", "MB sent per worker", "times fewer than diloco"]  # fmt: skip
    notes = [
        f"{' '.join([CONFIG.name, *arguments.set])}: seeds {arguments.seeds}; 4 workers",
        "equal steps and tokens per worker",
        "loss: of the anchor on fixed validation sequences; bytes: as counted where they are sent, warm start included",
        "alone: one worker on its own share of the data, without communication",
        "against ddp, alone, diloco: those with the same inner optimizer, and the same H",
    ]
    path = write(arguments.name, "Learning after equal tokens", columns, table(results), notes, results)
    plot(results, path.with_suffix(".png"))
    print(path.read_text(), circumstances()["commit"])


if __name__ == "__main__":
    main()
