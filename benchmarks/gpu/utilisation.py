"""The share of the machine's FLOPs that an inner step uses, as `isthmus profile` has it; with and without compiling."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import subject
from benchmarks.gpu.figures import Figure
from isthmus.config import RunConfig
from isthmus.data import open_batches
from isthmus.recipes import load_config
from isthmus.tools.profile.inner_step import count_flops, median_seconds, peak_flops
from isthmus.train import assemble, random_state

UTILISATION = 50.0
_WARM_STEPS = 3


def measure(folder: Path) -> Iterator[Figure]:
    """Yield the utilisation of every size, compiled or not, with its memory and what its losses are apart."""
    peak = 0.0
    for size, overrides in subject.SIZES.items():
        losses = list[float]()
        for compiled in subject.COMPILED:
            config = load_config(
                overrides=[
                    *overrides,
                    "data={type: text, source: stdlib}",
                    f"inner.precision={subject.PRECISION}",
                    f"inner.compile={str(compiled).lower()}",
                ]
            )
            peak = peak or peak_flops(subject.DEVICE, getattr(torch, subject.PRECISION))
            name = f"{size}, compiled" if compiled else size
            try:
                yield from _measure_one(name, config, peak, losses)
            except Exception as error:  # of memory, or of the compiler: the other sizes are measured all the same
                traceback.print_exc()
                yield Figure(f"{name}: failed ({str(error).strip().partition(chr(10))[0]})", 1, "", 0)
            gc.collect()
            if subject.ON_GPU:
                torch.cuda.empty_cache()
                torch.compiler.reset()


def _measure_one(name: str, config: RunConfig, peak: float, losses: list[float]) -> Iterator[Figure]:
    spec = assemble.build_model_spec(config)
    model = spec.build(0).to(subject.DEVICE)
    random_state.seed(0, 0)
    step = assemble.build_inner_step(config, model)
    stream = open_batches(assemble.open_data(config, spec), 0, config.inner.batch_size, 0, 1)
    batches = [{name: tensor.to(subject.DEVICE) for name, tensor in next(stream).items()} for _ in range(_WARM_STEPS)]
    if subject.ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        loss = step(batch)["loss"]
    memory = torch.cuda.max_memory_allocated() if subject.ON_GPU else 0
    seconds = median_seconds(lambda: step(batch))
    flops = count_flops(step, batch)
    details = {"step_seconds": seconds, "flops": flops, "peak_flops_per_second": peak, "peak_memory_bytes": memory}
    wanted = UTILISATION if config.inner.compile and name.split(",")[0] in subject.SIZES_WITH_A_GOAL else None
    share = 100 * flops / seconds / peak
    yield Figure(f"{name}: of the machine's FLOPs", share, " %", at_least=wanted, details=details)
    yield Figure(f"{name}: a step", 1e3 * seconds, " ms")
    yield Figure(f"{name}: most memory", memory / 1e9, " GB")
    losses.append(loss)
    if len(losses) > 1:
        apart = 100 * abs(losses[-1] / losses[0] - 1)
        yield Figure(f"{name}: loss of step {_WARM_STEPS}, apart from the one that is not", apart, " %", details=losses)
