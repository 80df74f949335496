"""Models of `diloco` and `muloco`, fine-tuned plainly on other texts, beside models of `ddp`.

Does what workers apart have learnt drift away faster (arXiv 2511.13761)? Each model learns Python (`domains.py`), then
C++ with AdamW in one process; the table has the loss of both texts on the way. Models are trained one for each core at
a time:

    python -m benchmarks.fine_tuning --seeds 0 1 2
    python -m benchmarks.fine_tuning --plot    # the newest table
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from typing import Any

import matplotlib as mpl
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import batched, domains, ladder
from benchmarks.questions import LRS, STEPS
from benchmarks.results import FOLDER, write
from isthmus.recipes import load_config

RUNG = "0.13M"
METHODS = {
    "ddp, AdamW": ("ddp", "adamw"),
    "diloco": ("diloco", "adamw"),
    "ddp, Muon": ("ddp", "muon"),
    "muloco": ("muloco", "muon"),
}
LOCAL_STEPS = 30
TUNED_STEPS = (0, 50, 100, 300)
TUNED_LRS = (1e-3, 3e-3)


def make_workers(source: str, seed: int, recipe: str, inside: str, lr: float, *more: str) -> batched.Workers:
    """Return workers of the rung that read texts of one folder."""
    optimizer = f"inner.optimizer={{type: {inside}, lr: {lr:.6f}}}"
    settings = [f"outer.recipe={recipe}", optimizer, f"train.seed={seed}", f"data.source={source}", *more]
    return batched.Workers(load_config(ladder.CONFIG, [*ladder.RUNGS[RUNG].overrides(), *settings]))


def fine_tune(method: str, seed: int) -> list[dict[str, Any]]:
    """Train a model, then fine-tune it with each rate; return the losses on the way."""
    torch.set_num_threads(1)
    python, cpp, *_ = domains.make()
    recipe, inside = METHODS[method]
    more = [] if recipe == "ddp" else [f"outer.schedule.local_steps={LOCAL_STEPS}"]
    trained = make_workers(python, seed, recipe, inside, LRS[inside][RUNG], f"train.steps={STEPS}", *more)
    batched.train(trained)
    found = []
    for lr in TUNED_LRS:
        settings = ("train.workers=1", f"train.steps={max(TUNED_STEPS)}", "inner.lr_schedule={type: cosine}")
        both = [make_workers(source, seed, "ddp", "adamw", lr, *settings) for source in (cpp, python)]
        for workers in both:
            workers.models[0].load_state_dict(trained.models[0].state_dict())
        tuned, other = both
        batches = tuned.open_batches()
        for step in range(max(TUNED_STEPS) + 1):
            if step in TUNED_STEPS:
                other.models[0].load_state_dict(tuned.models[0].state_dict())
                losses = {"cpp": tuned.evaluate(), "python": other.evaluate()}
                found.append({"method": method, "seed": seed, "lr": lr, "step": step, **losses})
            tuned.train_step(min(step, max(TUNED_STEPS) - 1), next(batches))
    return found


def mean_loss(found: list[dict[str, Any]], method: str, lr: float, step: int, text: str) -> float:
    """Return the mean loss over seeds after so many steps of fine-tuning."""
    losses: list[float] = [f[text] for f in found if (f["method"], f["lr"], f["step"]) == (method, lr, step)]
    return statistics.mean(losses)


def plot() -> None:
    """Draw the newest results, beside them: both texts' loss on the way, a line for each method and rate."""
    path = sorted(FOLDER.glob("*-fine-tuning.json"))[-1]
    found = json.loads(path.read_text())["results"]
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    titles = {"cpp": "C++, which is learnt", "python": "Python, learnt before"}
    for axes, (text, title) in zip(both, titles.items(), strict=True):
        for number, method in enumerate(METHODS):
            for lr, style in zip(TUNED_LRS, ("-", "--"), strict=True):
                losses = [mean_loss(found, method, lr, step, text) for step in TUNED_STEPS]
                axes.plot(TUNED_STEPS, losses, f"C{number}{'os^v'[number]}{style}", label=f"{method}, {lr:g}")
        axes.set(xlabel="steps of fine-tuning", ylabel="evaluation loss, nats a byte", title=title)
        axes.grid(alpha=0.3)
    both[1].legend(title="learnt Python with, AdamW's rate", fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    """Train, fine-tune, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--plot", action="store_true", help="draw what has been measured")
    arguments = parser.parse_args()
    if arguments.plot:
        plot()
        return
    seeds = arguments.seeds
    domains.make()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        plan = [(method, seed) for seed in seeds for method in METHODS]
        found = [each for losses in pool.starmap(fine_tune, plan, chunksize=1) for each in losses]
    rows = []
    for method in METHODS:
        for lr in TUNED_LRS:
            places = [(step, text) for step in TUNED_STEPS for text in ("cpp", "python")]
            cells = [f"{mean_loss(found, method, lr, step, text):.3f}" for step, text in places]
            rows.append([method, f"{lr:g}", *cells])
    columns = [
        "learnt Python with",
        "AdamW's rate",
        *(f"{t}, {n} steps" for n in TUNED_STEPS for t in ("C++", "Python")),
    ]
    notes = [f"{ladder.RUNGS[RUNG]}", f"{STEPS} steps of Python, H = {LOCAL_STEPS}; means over seeds {seeds}"]
    print(write("fine-tuning", "Fine-tuned on other texts", columns, rows, notes, found))


if __name__ == "__main__":
    main()
