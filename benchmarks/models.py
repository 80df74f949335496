"""Throughput of each model's inner step against the same model in a bare PyTorch loop: at least 98 % is asked.

Every example with a model of its own is taken. Both loops have the same data, optimizer and precision, start from equal
weights, and take turns of a few steps, so that what else the machine does hits both alike:

    python -m benchmarks.models
    python -m benchmarks.models --only gpt_neox --set model.size=pythia-160m inner.precision=bfloat16 --name models-gpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.results import write
from isthmus.config import RunConfig
from isthmus.core.streams import drain
from isthmus.data import OrderedBatches
from isthmus.inner import INNER_OPTIMIZERS
from isthmus.inner.step import Batch
from isthmus.recipes import load_config
from isthmus.spec import build
from isthmus.tools.profile.inner_step import describe_device
from isthmus.train import assemble, random_state

EXAMPLES = Path(__file__).parents[1] / "examples"
GOAL = 0.98
NUM_BATCHES = 8
TURN_SECONDS = 0.3  # of one loop before the other's turn
ROUNDS = 60  # after one that warms up


def examples(only: list[str]) -> dict[str, Path]:
    """Configurations that name a model and data that need no download, by file name; all, or some."""
    paths = [path for path in sorted(EXAMPLES.glob("*.yaml")) if path.stem in only or not only]
    values = {path: yaml.safe_load(path.read_text()) for path in paths}
    return {
        path.stem: path for path, value in values.items() if "model" in value and not value["data"].get("streaming")
    }


def bare_loop(config: RunConfig, model: Any) -> Callable[[Batch], None]:
    """What one would write without a library: zero_grad, forward, backward, clip, step; of two networks in turn."""
    inner = config.inner
    optimizer = build(INNER_OPTIMIZERS, inner.optimizer).build(model)
    device = next(model.parameters()).device.type

    def train(network: nn.Module, loss_of: Callable[[Batch], torch.Tensor], own: Any, batch: Batch) -> None:
        own.zero_grad()
        with nullcontext() if inner.precision == "float32" else torch.autocast(device, getattr(torch, inner.precision)):
            loss = loss_of(batch)
        loss.backward()
        if inner.clip_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), inner.clip_norm)
        own.step()

    def adversarial(batch: Batch) -> None:
        num_steps = inner.optimizer["discriminator_steps"]
        parts = {name: tensor.tensor_split(num_steps) for name, tensor in batch.items()}
        shares = [{name: part[i] for name, part in parts.items()} for i in range(num_steps)]
        for share in shares:
            train(model.discriminator, model.discriminator_loss, optimizer.parts[0], share)
        train(model.generator, model.generator_loss, optimizer.parts[1], shares[-1])

    if inner.optimizer["type"] == "adversarial":
        return adversarial
    return lambda batch: train(model, model, optimizer, batch)


def measure(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Seconds of a step in both loops, turn by turn."""
    config = load_config(path, ["inner.micro_batch_size=null", *overrides])
    device, spec = assemble.choose_device(), assemble.build_model_spec(config)
    random_state.seed(config.train.seed, 0)
    stream = OrderedBatches(assemble.open_data(config, spec).sample_order(config.train.seed), config.inner.batch_size)
    batches = [{name: tensor.to(device) for name, tensor in next(stream).items()} for _ in range(NUM_BATCHES)]
    ours, bare = (spec.build(config.train.seed).to(device) for _ in range(2))
    loops = {
        "ours": assemble.build_inner_step(config, ours),
        "bare": bare_loop(config, bare),
    }
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    once = sum(turn(loop, batches, NUM_BATCHES, clock) for loop in loops.values()) / 2
    steps = max(1, round(TURN_SECONDS / once))
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(ROUNDS + 1):
        for name in sorted(loops, reverse=round_ % 2 == 0):
            seconds = turn(loops[name], batches, steps, clock)
            if round_:
                taken[name].append(seconds)
    medians = {name: statistics.median(all_) for name, all_ in taken.items()}
    low, middle, high = statistics.quantiles([b / o for b, o in zip(taken["bare"], taken["ours"], strict=True)], n=4)
    return {
        "model": config.model["type"],
        "parameters": sum(param.numel() for param in ours.parameters()),
        "optimizer": config.inner.optimizer["type"],
        "precision": config.inner.precision,
        "steps_a_turn": steps,
        "bare_ms": 1e3 * medians["bare"],
        "ours_ms": 1e3 * medians["ours"],
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def turn(loop: Callable[[Batch], Any], batches: list[Batch], steps: int, clock: Callable[[], float]) -> float:
    """Seconds of a step."""
    drain()
    begin = clock()
    for number in range(steps):
        loop(batches[number % len(batches)])
    drain()
    return (clock() - begin) / steps


def main() -> None:
    """Measure every model, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of examples; all when not given")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all of them")
    parser.add_argument("--name", default="models", help="of the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for name, path in examples(given.only).items():
        results[name] = measure(path, given.set)
        print(name, json.dumps(results[name]), flush=True)
    rows = []
    for name, found in results.items():
        low, high = found["ratio_quartiles"]
        rows.append(
            [
                name,
                f"{found['parameters']:,}",
                f"{found['optimizer']}, {found['precision']}",
                f"{found['bare_ms']:.2f} ms",
                f"{found['ours_ms']:.2f} ms",
                f"{found['ratio']:.1%}",
                f"{low:.1%} to {high:.1%}",
                "met" if found["ratio"] >= GOAL else "missed",
            ]
        )
    columns = ["example", "parameters", "optimizer, precision", "a bare step", "ours", "throughput", "quartiles",
               f"goal {GOAL:.0%}"]  # fmt: skip
    notes = [
        f"device: {describe_device(assemble.choose_device())}" + (f"; {' '.join(given.set)}" if given.set else ""),
        f"the loops take turns of about {TURN_SECONDS} s, {ROUNDS} each; throughput: the time of a bare step over "
        "that of ours, the median (and quartiles) of pairs of turns next to each other, for a machine's speed drifts; "
        "times are the processor's on a CPU, where both loops never wait, and the wall's on a GPU",
        "both: zero_grad, forward, backward, clipping, optimizer; ours also scales the learning rate, returns loss and "
        "norm, and skips what is not finite",
    ]
    print(write(given.name, "The inner step against a bare PyTorch loop", columns, rows, notes, results).read_text())


if __name__ == "__main__":
    main()
