"""Measuring an inner step: its memory and speed by micro-batch size, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils import flop_counter

from isthmus.core import UserError
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


@dataclass(frozen=True)
class MicroBatch:
    """The memory and speed of an inner step with one micro-batch size."""

    size: int  # samples of a forward pass
    peak_bytes: int  # the most that is in use at once: weights, gradients, optimizer, activations
    samples_per_second: float  # of forward and backward passes alone


def try_micro_batches(step: SupervisedStep | AdversarialStep, batch: Batch) -> list[MicroBatch]:
    """Try all micro-batch sizes that `inner.micro_batch_size: auto` tries; return those that fit into memory.

    Args:
        step: before its first batch; trains a few steps here.
        batch: one of full size, on the model's device.
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
