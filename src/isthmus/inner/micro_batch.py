"""The micro-batch size with which a worker is fastest: measured, not guessed."""

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
    """The number of samples at once with which `step` goes through batches fastest, of those that fit into memory.

    Tries powers of two and the whole batch: the largest that fits need not be the fastest. Costs a few steps' time.
    Weights, buffers, gradients and optimizer are afterwards what they were; random numbers are not.

    Args:
        step: before its first batch.
        batch: one of full size.

    Returns:
        The size; in a tie the smaller.

    Raises:
        UserError: not even one sample fits.
    """
    rates = measure_rates(step, batch)
    return max(rates, key=rates.__getitem__)


def measure_rates(step: SupervisedStep, batch: Batch) -> dict[int, float]:
    """Samples a second of a forward and backward pass, by micro-batch size, of those that fit; see `find_fastest`."""
    num_samples = len(next(iter(batch.values())))
    sizes = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples] + [num_samples]
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]
    rates = dict[int, float]()
    try:
        _room = _stand_ins(step)
    except torch.OutOfMemoryError:
        sizes = []
    for size in sizes:
        part = {name: tensor[:size] for name, tensor in batch.items()}
        try:
            rates[size] = size / min(_time(step, part) for _ in range(_NUM_TRIALS))
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


def _stand_ins(step: SupervisedStep | AdversarialStep) -> list[torch.Tensor]:
    """The optimizer's state comes with its first step, so tensors keep its place: two a parameter, as AdamW has."""
    return [torch.empty_like(param) for param in step.model.parameters() if param.requires_grad for _ in range(2)]


def _time(step: SupervisedStep | AdversarialStep, part: Batch) -> float:
    """Seconds of one forward and backward pass."""
    drain()
    start = time.perf_counter()
    step.try_out(part)
    drain()
    return time.perf_counter() - start
