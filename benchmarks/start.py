"""What the length of the synchronous start is worth in short runs.

Runs of 1,000 steps of a rung of the ladder, four workers, each in one process (`benchmarks/batched.py`):

    python -m benchmarks.start 0.13M --recipes diloco muloco --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import ladder
from benchmarks.results import write

STEPS, LOCAL_STEPS = 1000, 30
LRS = {"adamw": {"0.13M": 1e-2, "0.9M": 6e-3}, "muon": {"0.13M": 1e-2, "0.9M": 1e-2}}


@dataclass(frozen=True)
class Start:
    """A run with a synchronous start of so many steps."""

    rung: str
    recipe: str
    seed: int
    steps: int = 0

    @property
    def inside(self) -> str:
        """The inner optimizer; `ddp` is run with both."""
        name = self.recipe.removeprefix("ddp ")
        return next((inside for inside, recipes in ladder.METHODS.items() if name in (inside, *recipes)), "adamw")

    def result(self) -> dict[str, Any]:
        """Train; return what came of it."""
        lr = LRS[self.inside][self.rung] * (2 if self.recipe in ladder.SPARSE else 1)
        is_ddp = self.recipe.startswith("ddp")
        more = [f"train.steps={STEPS}", f"train.eval_every={STEPS}"]
        if not is_ddp:
            more += [f"outer.schedule.warm_start_steps={self.steps}"]
        recipe = "ddp" if is_ddp else self.recipe
        run = ladder.Run(self.rung, recipe, self.inside, lr, self.seed, 0 if is_ddp else LOCAL_STEPS, more=tuple(more))
        return run.result() | {"recipe": self.recipe, "start": self.steps}


def main() -> None:
    """Run all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=LRS["adamw"])
    parser.add_argument("--recipes", nargs="+", default=["diloco", "muloco"])
    parser.add_argument("--starts", type=int, nargs="+", default=[STEPS // 8, STEPS // 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    plan = list[Start]()
    for seed in arguments.seeds:
        insides = {Start(arguments.rung, recipe, seed).inside for recipe in arguments.recipes}
        plan += [Start(arguments.rung, f"ddp {inside}", seed) for inside in sorted(insides)]
        for recipe in arguments.recipes:
            plan += [Start(arguments.rung, recipe, seed, n) for n in arguments.starts]
    results = ladder.run_all(plan)
    reference = {(r["inside"], r["seed"]): r["loss"] for r in results if r["method"] == "ddp"}
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault((result["recipe"], result["start"]), []).append(result)
    rows = []
    for (recipe, start), own in found.items():
        gaps = [100 * (r["loss"] / reference[r["inside"], r["seed"]] - 1) for r in own]
        spread = f"{min(gaps):+.2f} to {max(gaps):+.2f}" if len(gaps) > 1 else "-"
        sent = f"{own[0]['sent_bytes'] / 1e6:.1f}"
        rows.append([recipe, start or "-", f"{own[0]['loss']:.4f}", f"{statistics.mean(gaps):+.2f} %", spread, sent])
    columns = ["recipe", "steps of the start", "loss, first seed", "mean gap to ddp", "by seed, %", "MB sent"]
    notes = [f"{ladder.RUNGS[arguments.rung]}", f"{STEPS} steps, {ladder.WORKERS} workers, H = {LOCAL_STEPS}"]
    print(write(f"start-{arguments.rung}", f"The synchronous start at {arguments.rung}", columns, rows, notes, results))


if __name__ == "__main__":
    main()
