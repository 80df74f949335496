"""Workers that come and go: 2, 4, 1, 3 of them in one run, over each engine, against a run with 3 all along.

All runs take equal steps. Worker 0 stays and evaluates; the others join anew, and leave by SIGTERM. Every run's ledger
is compared with what its workers say that they trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.results import write
from benchmarks.workers import Event, Worker, Workers, check_ledger, serve_rendezvous

CONFIG = Path(__file__).with_name("learning.yaml")
OUTPUT = Path("runs/churn")
OVERRIDES = ["outer.recipe=diloco", "outer.transport.min_workers=1", "outer.transport.sync_budget_seconds=30",
             "inner.optimizer={type: adamw, lr: 1.0e-2}", "train.eval_batches=16", "train.log_every=1"]  # fmt: skip
START = 2
CHANGES = (((2, 3), (), 4), ((), (1, 2, 3), 1), ((4, 5), (), 3))  # who joins, who leaves: how many are there then
HOLD = 1 / 8  # of all steps: how long they stay so many, at least


def run(engine: str, name: str, steps: int, local_steps: int, workers: int, changes: Any = ()) -> dict[str, Any]:
    """One run, to its end."""
    folder = OUTPUT / name.replace(" ", "-")
    sets = [*OVERRIDES, f"train.steps={steps}", f"train.workers={workers}", f"train.eval_every={steps // 30}",
            f"outer.schedule.local_steps={local_steps}"]  # fmt: skip
    with serve_rendezvous(engine, folder) as found, Workers(folder, CONFIG, [*sets, *found]) as team:
        here = set(range(workers))
        for rank in here:
            team.start(rank)
        first = team.all[0]
        for joining, leaving, count in changes:
            until = step_of(first) + HOLD * steps
            team.wait(f"step {until:.0f}", lambda at=until: step_of(first) >= at, 300)
            for rank in joining:
                team.start(rank)
            team.leave(*leaving)
            here = (here | set(joining)) - set(leaving)
            team.wait(f"a sync of {count}", lambda n=count: first.syncs()[-1]["num_peers"] == n)
            print(f"{name}: {count} workers from step {step_of(first)} on", flush=True)
        team.wait("the end", lambda: all(team.all[rank].process.poll() == 0 for rank in here), 300)
        ledger = check_ledger(list(team.all.values()))
    evals = [(event["step"], event["loss"]) for event in first.of("eval")]
    counts = [(event["step"], event["num_peers"]) for event in first.syncs()]
    refused = [event["reason"] for worker in team.all.values() for event in worker.of("sync") if not event["committed"]]
    result = {"name": name, "engine": engine, "loss": evals[-1][1], "ledger": ledger, "refused": refused}
    print(json.dumps(result), flush=True)
    return result | {"evals": evals, "workers": counts}


def step_of(worker: Worker) -> int:
    """The last step at which it synced."""
    syncs: list[Event] = worker.syncs()
    return int(syncs[-1]["step"]) if syncs else 0


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss of the anchor over steps; below, how many workers each sync had."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    for result in results:
        (line,) = above.plot(*zip(*result["evals"], strict=True), marker=".", label=result["name"])
        below.step(*zip(*result["workers"], strict=True), where="post", color=line.get_color())
    above.set(ylabel="evaluation loss of the anchor")
    above.legend()
    below.set(xlabel="steps of the run", ylabel="workers of a sync", yticks=range(1, 5))
    for axes in (above, below):
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all three, then write table, data and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--engines", nargs="+", default=["torchft", "hivemind"])
    given = parser.parse_args()
    results = [run("torchft", "3 workers", given.steps, given.local_steps, 3)]
    for engine in given.engines:
        results.append(run(engine, f"2-4-1-3 over {engine}", given.steps, given.local_steps, START, CHANGES))
    rows = [row(result) for result in results]
    columns = ["run", "final loss", "syncs with 1, 2, 3, 4 workers", "samples in the anchors", "by the ledger",
               "of leavers, served again", "refused syncs"]  # fmt: skip
    notes = [
        f"{CONFIG.name}: {given.steps} steps, diloco, H = {given.local_steps}; the same seed; loss: of the anchor on "
        "fixed validation sequences",
        "samples in the anchors: trained on by each worker until it captured its last committed sync",
        "refused: as each worker saw it; one that has just come finds itself behind, which counts here",
    ]
    path = write("churn", "Workers that come and go", columns, rows, notes, results)
    plot(results, path.with_suffix(".png"))
    print(path.read_text())


def row(result: dict[str, Any]) -> list[Any]:
    counts = [num_peers for _, num_peers in result["workers"]]
    ledger = result["ledger"]
    syncs = ", ".join(str(counts.count(number)) for number in (1, 2, 3, 4))
    return [result["name"], f"{result['loss']:.4f}", syncs, *ledger.values(), len(result["refused"])]


if __name__ == "__main__":
    main()
