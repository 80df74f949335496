"""Measuring with which micro-batch size a worker is fastest."""

from __future__ import annotations

import time

import torch

from isthmus.core.streams import drain
from isthmus.core.types import UserError
from isthmus.inner.adversarial import AdversarialStep
from isthmus.inner.step import Batch
from isthmus.inner.supervised import SupervisedStep

_NUM_TRIALS = 3  # of every size; the first of them warms up, the fastest counts


def find_fastest(step: SupervisedStep | AdversarialStep, batch: Batch) -> int:
    """Return the micro-batch size with which `step` is fastest, among those that fit into memory.

    Tries powers of two and the whole batch: the largest that fits need not be the fastest. Costs a few steps' time.
    Weights, buffers, gradients and optimizer are afterwards what they were; random numbers are not.

    In a tie the smaller one counts. `step` is before its first batch, `batch` of full size.
    """
    rates = measure_rates(step, batch)
    return max(rates, key=rates.__getitem__)


def measure_rates(step: SupervisedStep | AdversarialStep, batch: Batch) -> dict[int, float]:
    """Return samples per second of a forward and backward pass, by micro-batch size; see `find_fastest`."""
    num_samples = len(next(iter(batch.values())))
    sizes = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples] + [num_samples]
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]
    rates = dict[int, float]()
    try:  # the memory of the optimizer's state, which its first step makes: two tensors a parameter, as in AdamW
        _reserved = [torch.empty_like(param) for param in step.model.parameters() if param.requires_grad for _ in "12"]
    except torch.OutOfMemoryError:
        sizes = []
    for size in sizes:
        part = {name: tensor[:size] for name, tensor in batch.items()}
        try:
            rates[size] = size / min(_seconds_of(step, part) for _ in range(_NUM_TRIALS))
        except torch.OutOfMemoryError:
            break  # a larger one will not fit either
        except (UserError, ValueError):  # the model refuses so few: batch norm, for one
            if size == num_samples:
                raise
        finally:
            step.optimizer.zero_grad()
            for buffer, before in buffers:
                buffer.copy_(before)
    if not rates:
        raise UserError(
            "not even one sample fits into this worker's memory: choose a smaller model, or inner.precision"
        )
    return rates


def _seconds_of(step: SupervisedStep | AdversarialStep, part: Batch) -> float:
    """Return the seconds of one forward and backward pass."""
    drain()
    start = time.perf_counter()
    step.forward_backward(part)
    drain()
    return time.perf_counter() - start
