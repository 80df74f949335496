"""What a slow worker costs the whole: two workers over torchft, one with a third of a core.

Tokens per second are those committed to the anchors, between two syncs, after the first few: first of each worker
alone, which syncs with nobody, then of both together, with each its own H and with equal H for both.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.quota import quota
from benchmarks.results import write
from benchmarks.workers import Event, Worker, Workers, check_ledger, serve_rendezvous

CONFIG = Path(__file__).with_name("learning.yaml")
OUTPUT = Path("runs/pace")
SHARE = 1 / 3
SLOW = 1  # this worker's rank
WARM_SYNCS = 5  # speeds are on the cards from the second sync on, and averages over the last round or two
OVERRIDES = ["outer.recipe=diloco", "inner.batch_size=16", "train.steps=1000000", "train.eval_every=0",
             "train.log_every=1", "outer.hash_every=0",
             "outer.schedule.warm_start_steps=0"]  # fmt: skip
EQUAL_H = ("-c", "from isthmus.outer.dynamic_local_steps import DynamicLocalSteps as Steps; "
                 "Steps.adapt = lambda *_: None; from isthmus.cli import main; main()")  # fmt: skip


def measure(name: str, ranks: list[int], local_steps: int, seconds: float, equal: bool = False) -> dict[str, Any]:
    """One run."""
    folder = OUTPUT / name.replace(" ", "-")
    sets = [*OVERRIDES, f"outer.schedule.local_steps={local_steps}", f"train.workers={len(ranks)}"]
    with ExitStack() as stack:
        found = stack.enter_context(serve_rendezvous("torchft", folder))
        program = EQUAL_H if equal else ("-m", "isthmus")
        workers = stack.enter_context(Workers(folder, CONFIG, [*sets, *found], program))
        for rank in ranks:
            workers.start(rank, core=rank)
        all_workers = [workers.all[rank] for rank in ranks]
        workers.wait("the first step", lambda: all(worker.tokens for worker in all_workers))
        how = stack.enter_context(quota(workers.all[SLOW].process.pid, SHARE)) if SLOW in ranks else ""
        first = WARM_SYNCS
        workers.wait("warm-up", lambda: all(len(worker.syncs()) > first for worker in all_workers))
        begin = all_workers[0].syncs()[first]["seen"]

        def last() -> int:
            return min(len(worker.syncs()) for worker in all_workers) - 1

        workers.wait("the end", lambda: all_workers[0].syncs()[last()]["seen"] - begin >= seconds, 3 * seconds + 60)
        end = last()
        workers.leave(*ranks)
        ledger = check_ledger(all_workers)
    wall = all_workers[0].syncs()[end]["seen"] - begin
    result = {"name": name, "ranks": ranks, "quota": how, "seconds": wall, "syncs": end - first, "ledger": ledger}
    syncs = [worker.syncs() for worker in all_workers]
    for rank, worker, own in zip(ranks, all_workers, syncs, strict=True):
        tokens = worker.tokens_at(own[end]) - worker.tokens_at(own[first])
        steps = steps_between(worker, own[first], own[end]) / (end - first)
        waited = sum(sync["seconds"] for sync in own[first + 1 : end + 1])
        result[f"worker {rank}"] = {"tokens_per_second": tokens / wall, "H": steps, "sync_share": waited / wall}
    result["tokens_per_second"] = sum(result[f"worker {rank}"]["tokens_per_second"] for rank in ranks)
    print(json.dumps(result), flush=True)
    return result


def steps_between(worker: Worker, first: Event, last: Event) -> int:
    """Inner steps that this worker took between two syncs."""
    events = worker.events[worker.events.index(first) : worker.events.index(last)]
    return sum(event["event"] == "step" for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    given = parser.parse_args()
    fast = measure("fast alone", [0], given.local_steps, given.seconds)
    slow = measure("slow alone", [1], given.local_steps, given.seconds)
    own = measure("own H", [0, 1], given.local_steps, given.seconds)
    equal = measure("equal H", [0, 1], given.local_steps, given.seconds, equal=True)
    alone = fast["tokens_per_second"] + slow["tokens_per_second"]
    rows = [row(fast, alone), row(slow, alone), row(own, alone), row(equal, alone)]
    columns = ["run", "inner steps a round", "tokens/s", "of what the workers do alone", "time in syncs"]
    notes = [
        f"{CONFIG.name} with batches of 16, diloco, H = {given.local_steps}; a worker a core; worker {SLOW} slowed by "
        f"{slow['quota']}",
        f"committed tokens over wall seconds, from commit to commit, for at least {given.seconds:g} s after "
        f"{WARM_SYNCS + 1} commits",
        "alone: a run of one worker, which syncs with itself",
        "equal H: every worker takes H steps a round, and the fast one waits",
    ]
    print(write("pace", "A worker with a third of a core", columns, rows, notes, [fast, slow, own, equal]).read_text())
    if own["tokens_per_second"] < 0.95 * alone:
        sys.exit("less than 95 % of what the workers do alone")


def row(result: dict[str, Any], alone: float) -> list[Any]:
    each = [result[f"worker {rank}"] for rank in result["ranks"]]
    rate = result["tokens_per_second"]
    steps = " and ".join(f"{worker['H']:.1f}" for worker in each)
    syncs = " and ".join(f"{worker['sync_share']:.1%}" for worker in each)
    return [result["name"], steps, f"{rate:,.0f}", f"{rate / alone:.1%}", syncs]


if __name__ == "__main__":
    main()
