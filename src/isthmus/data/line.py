"""One worker's batches out of the line of all samples, where the workers are always the same."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.base import Batches, DataSet, SampleOrder
from isthmus.data.streamed import StreamedDataSet
from isthmus.inner.step import Batch


class OrderedBatches:
    """Worker w of W takes every W-th batch of the line: the workers' samples are disjoint, and together all of it.

    Args:
        samples: the line.
        batch_size: samples a batch.
        worker: number of this worker, from 0.
        num_workers: that share the line.
    """

    def __init__(self, samples: SampleOrder, batch_size: int, worker: int = 0, num_workers: int = 1) -> None:
        if batch_size < 1:
            raise UserError(f"data: batch_size is {batch_size}; choose at least 1")
        self.tokens_per_batch = batch_size * samples.tokens_per_sample
        self._samples, self._batch_size = samples, batch_size
        self._worker, self._num_workers = worker, num_workers
        self._position = 0  # in the line, where all workers' next batches begin

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; one may join the ends of two epochs."""
        first = self._position + self._worker * self._batch_size
        self._position += self._num_workers * self._batch_size
        return self._samples.read(np.arange(first, first + self._batch_size))

    def state_dict(self) -> dict[str, Any]:
        """The position, which does not depend on the worker, and what it is a position in."""
        return {"position": self._position, "fingerprint": self._samples.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, of any worker among any number; refuses one in other data."""
        if state_dict["fingerprint"] != self._samples.fingerprint:
            raise UserError(
                f"data: the saved position is one in data {state_dict['fingerprint']}, these are "
                f"{self._samples.fingerprint}: restore the data, their seed and sample size, or start a new run"
            )
        self._position = state_dict["position"]


def open_batches(data_set: DataSet, seed: int, batch_size: int, worker: int, num_workers: int) -> Batches:
    """One worker's batches: of the data_set's own stream, where it can only be read in order, else of its line."""
    if isinstance(data_set, StreamedDataSet):
        return data_set.stream(seed, batch_size, worker, num_workers)
    return OrderedBatches(data_set.sample_order(seed), batch_size, worker, num_workers)
