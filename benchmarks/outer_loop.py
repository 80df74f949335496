"""What the outer loop costs a worker: seconds of a step without a sync, and memory, for every recipe.

Memory is the most that live tensors take at any moment of training, in multiples of the model in float32: in the plain
inner loop (weights, gradients, inner optimizer, activations), with the recipe's outer loop, and with its outer state
offloaded. On a GPU that is the allocator's own figure; on a CPU tensors are counted where operations make
them, the offloaded ones apart. A worker alone: of messages only its own is there.

    python -m benchmarks.outer_loop [recipe ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import subject
from benchmarks.live_bytes import CountedOffload, TwoPlaces, follow
from benchmarks.results import write
from isthmus.core import SyncSchedule
from isthmus.outer import OuterLoop
from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.recipes import RECIPES, Recipe, load_config
from isthmus.recipes.base import Plan
from isthmus.tools.live_bytes import LiveBytesMode
from isthmus.train.assemble import build_inner_step
from isthmus.transport.local import Local, LocalWorld

H = 4
STEPS = 20
QUIET_STEPS = 2000


class Training:
    """One worker's model, inner step and outer loop, as a recipe has them."""

    def __init__(self, name: str, with_outer_loop: bool = True, offload: str | None = None) -> None:
        settings = [f"outer.recipe={name}", f"inner.precision={subject.PRECISION}", f"train.steps={STEPS}"]
        recipe: Recipe = RECIPES.get(name)(Plan(num_workers=4, steps=STEPS, local_steps=H))
        self.model, self.live = subject.build_model(), TwoPlaces()
        self.live.add(self.model.parameters())
        self.inner_step = build_inner_step(load_config(overrides=settings), self.model)
        self.loop: OuterLoop | None = None
        if with_outer_loop and recipe.schedule:
            transport = Local(LocalWorld(1), 0)
            self.loop = recipe.outer_loop(self.model, transport, CountedOffload(offload, self.live))
            self.live.add(anchor for fragment in self.loop.state.fragments for anchor in fragment.anchor)

    def step(self, batch: Any) -> tuple[float, float]:
        """Seconds of the inner step and of the outer loop's."""
        began = time.perf_counter()
        self.inner_step(batch)
        trained = time.perf_counter()
        if self.loop:
            self.loop.step()
        return trained - began, time.perf_counter() - trained


def peak_bytes(name: str, with_outer_loop: bool = True, offload: str | None = None) -> tuple[int, int]:
    """Most bytes beside the model's parameters, those included, and bytes offloaded."""
    training, batch = Training(name, with_outer_loop, offload), subject.batch()
    live = training.live
    if training.loop:
        follow(training.loop, LiveBytesMode(live))
    with LiveBytesMode(live):
        for step in range(STEPS):
            if step == STEPS // 2:  # by now every kind of state is there
                live.peak = live.now()
                if subject.ON_GPU:
                    torch.cuda.reset_peak_memory_stats()
            training.step(batch)
    if training.loop:
        training.loop.close()
    peak = torch.cuda.max_memory_allocated() if subject.ON_GPU else live.peak
    return peak, live.now_offloaded()


def measure(name: str) -> dict[str, float]:
    """All figures of one recipe."""
    training, batch = Training(name), subject.batch()
    seconds = [training.step(batch) for _ in range(STEPS)]
    inner = statistics.median(inner for inner, _ in seconds)
    quiet = 0.0
    if training.loop:
        training.loop.state.schedule = AdaptiveSchedule(SyncSchedule(10**9))
        began = time.perf_counter()
        for _ in range(QUIET_STEPS):
            training.loop.step()
        quiet = (time.perf_counter() - began) / QUIET_STEPS
        training.loop.close()
    model_bytes = 4 * sum(param.numel() for param in training.model.parameters())
    del training
    peaks = {
        "plain": peak_bytes(name, with_outer_loop=False),
        "recipe": peak_bytes(name),
        "offload": peak_bytes(name, offload="cpu"),
    }
    return {
        "step_microseconds": round(1e6 * quiet, 1),
        "longest_outer_step": round(max(outer for _, outer in seconds) / inner, 2),
        **{f"{kind}_peak": round(peak / model_bytes, 2) for kind, (peak, _) in peaks.items()},
        "offloaded": round(peaks["offload"][1] / model_bytes, 2),
    }


def main() -> None:
    """Measure every recipe and write the result."""
    torch.set_num_threads(1)
    results = {}
    for name in sys.argv[1:] or RECIPES.names():
        results[name] = measure(name)
        print(name, results[name], flush=True)
    columns = ["recipe", "step without a sync, us", "longest outer step, inner steps", "memory: plain inner loop",
               "with the outer loop", "with outer.offload", "offloaded"]  # fmt: skip
    rows = [[name, *values.values()] for name, values in results.items()]
    notes = [
        subject.describe(),
        "memory in multiples of the model in float32, most at any moment of the last "
        f"{STEPS // 2} of {STEPS} steps, H = {H}",
        "a worker alone, without the others' messages; ddp alone is the plain inner loop, with others torch's buckets "
        "of gradients, one model, come on top",
    ]
    print(write("outer-loop", "The cost of the outer loop", columns, rows, notes, results))


if __name__ == "__main__":
    main()
