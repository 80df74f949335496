"""What an inner step takes: memory, time by micro-batch size, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from isthmus.core import UserError
from isthmus.inner import SupervisedStep
from isthmus.inner.micro_batch import measure_rates
from isthmus.inner.step import Batch
from isthmus.tools.live_bytes import LiveBytes, Watch


def _attention(query: Any, key: Any, value: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


_CPU_ATTENTION = {  # which torch's counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class MicroBatch:
    """An inner step that takes so many samples at once."""

    size: int
    peak_bytes: int  # the most that is there at once: weights, gradients, optimizer, activations
    samples_per_second: float  # of forward and backward passes alone


def try_sizes(step: SupervisedStep, batch: Batch) -> list[MicroBatch]:
    """All micro-batch sizes that `inner.micro_batch_size: auto` tries, of those that fit.

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
        raise UserError("profile: not even one sample fits into memory beside gradients and optimizer: see mesh.shard")
    return tried


class _Memory:
    """The most memory in use during an inner step: the allocator's figure on a GPU, live tensors on a CPU."""

    def __init__(self, step: SupervisedStep) -> None:
        self._step, self._live = step, LiveBytes()
        self._live.add([*step.model.parameters(), *step.model.buffers()])

    def peak(self, batch: Batch, size: int) -> int:
        """Of a step with micro-batches of this size."""
        self._step.micro_batch_size = size
        if next(iter(batch.values())).is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._step(batch)
            return torch.cuda.max_memory_allocated()
        self._live.peak = self._live.now()
        with torch.compiler.set_stance("force_eager"), Watch(self._live):
            self._step(batch)
        return self._live.peak


def count_flops(step: SupervisedStep, batch: Batch) -> int:
    """Multiplications and additions of one step's matrix products, convolutions and attention, by torch's formulas."""
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with torch.compiler.set_stance("force_eager"), counter:
        step(batch)
    return int(counter.get_total_flops())
