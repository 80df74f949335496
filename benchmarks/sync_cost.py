"""Processor time that a worker's syncs take of a run: capture, codec of all messages, outer step, merge; no waiting.

Two workers in one process hand each other their messages through memory, so neither link nor sockets count. Inner
steps are measured by themselves, just before and after; between syncs the parameters are only moved a little. What is
trained is that of benchmarks/wan:

    python -m benchmarks.sync_cost [recipe ...]
"""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
from dataclasses import replace

import torch
from torch import nn

from benchmarks.results import write
from benchmarks.wan.worker import CONFIG
from isthmus.data import OrderedBatches
from isthmus.recipes import RECIPES, load_config
from isthmus.recipes.base import Plan
from isthmus.train import assemble
from isthmus.transport.local import Local, LocalWorld

WORKERS = 2
H = 50
GOAL = 0.01
WARM_UP, ROUNDS, REPEATS = 2, 10, 5
INNER_STEPS = 30


class Move:
    """Stands in for inner steps: adds noise to a model's parameters, and takes it away the next time."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = list(model.parameters())
        self.noise = [0.01 * torch.randn(param.shape, generator=generator) for param in self.params]
        self.sign = 1

    @torch.no_grad()
    def __call__(self) -> None:
        """One round's."""
        torch._foreach_add_(self.params, self.noise, alpha=self.sign)
        self.sign = -self.sign


def sync_seconds(name: str, model: nn.Module) -> float:
    """Processor seconds of one worker in a round of H steps, inner steps left out."""
    recipe = RECIPES.get(name)(Plan(WORKERS, 100 * H, H))
    assert recipe.schedule is not None
    recipe = replace(recipe, schedule=replace(recipe.schedule, warm_start_steps=0))
    world, barrier = LocalWorld(WORKERS), threading.Barrier(WORKERS + 1)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        own = copy.deepcopy(model)
        move = Move(own, rank)
        try:
            loop = recipe.outer_loop(own, Local(world, rank))
            for number in range(WARM_UP + ROUNDS):
                if number == WARM_UP:
                    barrier.wait()
                move()
                for _ in range(H):
                    loop.step()
            barrier.wait()
            loop.close()
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.process_time()
    barrier.wait()
    taken = time.process_time() - begin
    for thread in threads:
        thread.join()
    move = Move(copy.deepcopy(model), 0)
    begin = time.process_time()
    for _ in range(ROUNDS):
        move()
    return taken / WORKERS / ROUNDS - (time.process_time() - begin) / ROUNDS


def main() -> None:
    """Measure every recipe and write the result."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or [name for name in RECIPES.names() if name != "ddp"]
    config = load_config(CONFIG)
    spec = assemble.build_model_spec(config)
    model = spec.build(0)
    step = assemble.build_inner_step(config, copy.deepcopy(model))
    samples = assemble.open_data(config, spec).sample_order(config.train.seed)
    batch = next(OrderedBatches(samples, config.inner.batch_size))

    def inner_seconds() -> float:
        begin = time.process_time()
        for _ in range(INNER_STEPS):
            step(batch)
        return (time.process_time() - begin) / INNER_STEPS

    inner_seconds()
    rows, data = [], {}
    for name in names:
        shares, syncs, inners = [], [], [inner_seconds()]
        for _ in range(REPEATS):
            syncs.append(sync_seconds(name, model))
            inners.append(inner_seconds())
            shares.append(syncs[-1] / (syncs[-1] + H * (inners[-2] + inners[-1]) / 2))
        share = statistics.median(shares)
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(syncs):.1f}",
                f"{1e3 * statistics.median(inners):.1f}",
                f"{share:.2%}",
                f"{min(shares):.2%} to {max(shares):.2%}",
                "met" if share < GOAL else "missed",
            ]
        )
        data[name] = {"sync_seconds": syncs, "inner_seconds": inners, "shares": shares}
        print(*rows[-1], flush=True)
    count = sum(param.numel() for param in model.parameters())
    columns = ["recipe", "a round's syncs, ms", "an inner step, ms", f"share at H = {H}", f"of {REPEATS} repeats",
               f"goal {GOAL:.0%}"]  # fmt: skip
    notes = [
        f"GPT-NeoX of {count:,} parameters, {config.inner.batch_size} sequences of 128 tokens a step (benchmarks/wan); "
        f"{WORKERS} workers, their messages handed over in memory; one thread",
        "processor time of one worker: capture, encoding, decoding all messages, outer step, merge, H - 1 steps "
        "without a sync; the work grows with the model alone, an inner step's with the tokens too",
    ]
    print(write("sync-cost", "What syncs cost a worker", columns, rows, notes, data).read_text())


if __name__ == "__main__":
    main()
