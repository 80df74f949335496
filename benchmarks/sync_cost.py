"""Processor time that a worker's syncs take of a run: capture, codec of all messages, outer step, merge; no waiting.

Two workers in one process hand each other their messages through memory, so neither link nor sockets count; with
--link they are processes, whose messages cross our link on loopback, under TLS, and all threads of a process count.
Inner steps are measured by themselves, just before and after; between syncs the parameters are only moved a little.
What is trained is that of benchmarks/wan:

    python -m benchmarks.sync_cost [recipe ...]
    python -m benchmarks.sync_cost --link [recipe ...]
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.results import write
from benchmarks.wan.worker import CONFIG
from isthmus.data import OrderedBatches
from isthmus.recipes import RECIPES, load_config
from isthmus.recipes.base import Plan
from isthmus.train import assemble
from isthmus.transport import Transport
from isthmus.transport.address import free_port
from isthmus.transport.local import Local, LocalWorld
from isthmus.transport.torch_dist import TorchDist

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


def take_rounds(name: str, own: nn.Module, transport: Transport, rank: int, wait: Callable[[], object]) -> None:
    """Sync as one worker, in rounds of H steps; wait for the other one when those that count begin and end."""
    recipe = RECIPES.get(name)(Plan(WORKERS, 100 * H, H))
    assert recipe.schedule is not None
    recipe = replace(recipe, schedule=replace(recipe.schedule, warm_start_steps=0))
    move, loop = Move(own, rank), recipe.outer_loop(own, transport)
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            wait()
        move()
        for _ in range(H):
            loop.step()
    wait()
    loop.close()


def sync_seconds(name: str, model: nn.Module) -> float:
    """Processor seconds of one worker in a round of H steps, inner steps left out."""
    world, barrier = LocalWorld(WORKERS), threading.Barrier(WORKERS + 1)

    def work(rank: int) -> None:
        try:
            take_rounds(name, copy.deepcopy(model), Local(world, rank), rank, barrier.wait)
        except BaseException:
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
    return taken / WORKERS / ROUNDS - move_seconds(model)


def link_seconds(name: str, model: nn.Module) -> float:
    """The same of a process whose messages cross the link."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORKERS)}
    os.environ["ISTHMUS_RUN_SECRET"] = secrets.token_hex()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        return max(pool.starmap(over_link, [(name, model, rank) for rank in range(WORKERS)], chunksize=1))


def over_link(name: str, model: nn.Module, rank: int) -> float:
    """Be one worker; return the processor seconds of a round."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    marks = list[float]()
    take_rounds(name, model, TorchDist(), rank, lambda: marks.append(time.process_time()))
    return (marks[1] - marks[0]) / ROUNDS - move_seconds(model)


def move_seconds(model: nn.Module) -> float:
    """Processor seconds of what stands in for the inner steps of a round."""
    move = Move(copy.deepcopy(model), 0)
    begin = time.process_time()
    for _ in range(ROUNDS):
        move()
    return (time.process_time() - begin) / ROUNDS


def main() -> None:
    """Measure every recipe and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="all but ddp when not given")
    parser.add_argument("--link", action="store_true", help="messages cross the link, under TLS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.recipes or [name for name in RECIPES.names() if name != "ddp"]
    measure = link_seconds if arguments.link else sync_seconds
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
            syncs.append(measure(name, model))
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
        f"{WORKERS} workers, whose messages "
        + ("cross the link on loopback under TLS; all threads" if arguments.link else "are handed over in memory"),
        "processor time of one worker: capture, encoding, decoding all messages, outer step, merge, H - 1 steps "
        "without a sync; the work grows with the model alone, an inner step's with the tokens too",
    ]
    name = "sync-cost-link" if arguments.link else "sync-cost"
    print(write(name, "What syncs cost a worker", columns, rows, notes, data).read_text())


if __name__ == "__main__":
    main()
