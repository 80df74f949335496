"""The micro-batch size with which a worker is fastest: measured, not guessed."""

from __future__ import annotations

import time

import torch

from isthmus.core.types import UserError
from isthmus.inner.step import Batch
from isthmus.inner.supervised import SupervisedStep

_NUM_TRIALS = 3  # of every size; the first of them warms up, the fastest counts


def find_fastest(step: SupervisedStep, batch: Batch) -> int:
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
    num_samples = len(next(iter(batch.values())))
    sizes = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples] + [num_samples]
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]
    rates = dict[int, float]()
    for size in sizes:
        part = {name: tensor[:size] for name, tensor in batch.items()}
        try:
            rates[size] = size / min(_time(step, part) for _ in range(_NUM_TRIALS))
        except torch.OutOfMemoryError:
            break  # a larger one will not fit either
        except UserError:  # the model refuses so few: batch norm, for one
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
    return max(rates, key=rates.__getitem__)


def _time(step: SupervisedStep, part: Batch) -> float:
    """Seconds of one forward and backward pass."""
    _wait()
    start = time.perf_counter()
    step.try_out(part)
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
