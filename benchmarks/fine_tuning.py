"""Models of `diloco` and `muloco`, fine-tuned plainly on other texts, beside models of `ddp`.

Does what workers apart have learnt drift away faster (arXiv 2511.13761)? Each model learns Python (`domains.py`), then
C++ with AdamW in one process; the table has the loss of both texts on the way. Models are trained one for each core at
a time:

    python -m benchmarks.fine_tuning --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from typing import Any

import torch

from benchmarks import batched, domains, ladder
from benchmarks.questions import LRS, STEPS
from benchmarks.results import write
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


def main() -> None:
    """Train, fine-tune, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    seeds = parser.parse_args().seeds
    domains.make()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        plan = [(method, seed) for seed in seeds for method in METHODS]
        found = [each for losses in pool.starmap(fine_tune, plan, chunksize=1) for each in losses]
    rows = []
    for method in METHODS:
        for lr in TUNED_LRS:
            cells = []
            for step in TUNED_STEPS:
                own = [f for f in found if (f["method"], f["lr"], f["step"]) == (method, lr, step)]
                cells += [f"{statistics.mean(f[text] for f in own):.3f}" for text in ("cpp", "python")]
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
