"""Measuring an inner step: memory and speed by micro-batch size, arithmetic, and the peak of this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import flop_counter

from isthmus.core import UserError
from isthmus.core.streams import drain
from isthmus.inner import AdversarialStep, SupervisedStep
from isthmus.inner.micro_batch import measure_rates
from isthmus.inner.step import Batch
from isthmus.tools.live_bytes import LiveBytes, LiveBytesMode

_FORWARD: Callable[..., int] = flop_counter.sdpa_flop_count
_BACKWARD: Callable[..., int] = flop_counter.sdpa_backward_flop_count
_CPU_ATTENTION = {  # which torch's counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **options: _FORWARD(*args[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **options: _BACKWARD(*args[:4]),
}
_LEAST_CALLS, _LEAST_SECONDS = 3, 1.0


@dataclass(frozen=True)
class MicroBatch:
    """The memory and speed of an inner step with one micro-batch size."""

    size: int  # samples of a forward pass
    peak_bytes: int  # the most that is in use at once: weights, gradients, optimizer, activations
    samples_per_second: float  # of forward and backward passes alone


def try_micro_batches(step: SupervisedStep | AdversarialStep, batch: Batch) -> list[MicroBatch]:
    """Try all micro-batch sizes that `inner.micro_batch_size: auto` tries; return those that fit into memory.

    The step, which has seen no batch before, trains a few times here, on a batch of full size.
    """
    rates, memory, tried = measure_rates(step, batch), _Memory(step), list[MicroBatch]()
    try:
        memory.peak(batch, min(rates))  # from here on every kind of state is there
        for size, rate in rates.items():
            tried.append(MicroBatch(size, memory.peak(batch, size), rate))
    except torch.OutOfMemoryError:  # a pass fitted, but not beside gradients and the optimizer's state
        step.optimizer.zero_grad()
    if not tried:
        raise UserError("not even one sample fits into memory beside gradients and optimizer: see mesh.shard")
    return tried


class _Memory:
    """The most memory in use during an inner step: the allocator's figure on a GPU, live tensors on a CPU."""

    def __init__(self, step: SupervisedStep | AdversarialStep) -> None:
        self._step, self._live = step, LiveBytes()
        self._live.add([*step.model.parameters(), *step.model.buffers()])

    def peak(self, batch: Batch, size: int) -> int:
        """Return the bytes that a step with micro-batches of this size uses at most."""
        self._step.micro_batch_size = size
        if next(iter(batch.values())).is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._step(batch)
            return torch.cuda.max_memory_allocated()
        self._live.peak = self._live.now()
        with torch.compiler.set_stance("force_eager"), LiveBytesMode(self._live):
            self._step(batch)
        return self._live.peak


def count_flops(step: SupervisedStep | AdversarialStep, batch: Batch) -> int:
    """Count the FLOPs of one step's matrix products, convolutions and attention, by torch's formulas."""
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with torch.compiler.set_stance("force_eager"), counter:
        step(batch)
    return int(counter.get_total_flops())


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or that of the processor and how many threads torch has there."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    count = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {count} thread{'s' * (count > 1)}"


def median_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has done one call: the median of a few, after one that warms up."""
    return median(_repeat(work))


def matrix_size(device: torch.device) -> int:
    """Return the size of the square matrices that are multiplied: large enough to keep the device busy."""
    return 8192 if device.type == "cuda" else 1024


@torch.no_grad()
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the additions and multiplications a second of the fastest of several products of two square matrices.

    This is what the device does here and now, with what else runs on it, not what its data sheet says.
    """
    size = matrix_size(device)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / min(_repeat(lambda: torch.mm(left, right, out=product)))


def _repeat(work: Callable[[], Any]) -> list[float]:
    work()
    taken = list[float]()
    while len(taken) < _LEAST_CALLS or sum(taken) < _LEAST_SECONDS:
        drain()
        begin = time.perf_counter()
        work()
        drain()
        taken.append(time.perf_counter() - begin)
    return taken
