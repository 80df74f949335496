"""The contract of data: training samples in one endless order for all workers, and validation batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from isthmus.core.types import UserError
from isthmus.inner.step import Batch

Positions = npt.NDArray[np.int64]  # [batch], in an order of samples; also numbers of samples


class Batches(Protocol):
    """Endless batches for one worker, with an exact position that can be saved and restored."""

    @property
    def tokens_per_batch(self) -> int:
        """The tokens a batch trains on; images or seconds of sound, where there are no tokens."""
        ...

    def __iter__(self) -> Self: ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position."""
        ...


class SampleOrder(Protocol):
    """All training samples in one endless order, epoch after epoch, alike for all workers, who share it out."""

    @property
    def fingerprint(self) -> str:
        """A text that differs where a position stands for another sample: other data, sequence length or seed."""
        ...

    @property
    def num_samples(self) -> int:
        """The samples of an epoch."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """The tokens a sample trains on; 1 for an image, seconds of sound."""
        ...

    def read(self, positions: Positions) -> Batch:
        """Return the samples at these positions of the order, which are not negative."""
        ...


class DataSet(Protocol):
    """Data that are opened: samples to train on and to evaluate with."""

    @property
    def sizes(self) -> dict[str, int]:
        """The least that a model must have, by the names of its options: {"vocab_size": 256}."""
        ...

    def sample_order(self, seed: int = 0) -> SampleOrder:
        """Return all training samples, in the order that `seed` chooses."""
        ...

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Return a fixed set of batches, equal on all workers and in all runs, with at most `num_samples` samples."""
        ...


class DataSpec(Protocol):
    """A description of data: a frozen dataclass whose fields are its options.

    One that also has a method `check_source` says with it, in a moment and without a model, what is missing: a
    `UserError` for a folder that is not there, a library that is not installed, text in another encoding than UTF-8.
    One with `known_sizes` knows before it is opened some of what its data set's `sizes` will be.
    """

    @property
    def open(self) -> Callable[..., DataSet]:
        """The function that finds and reads the data.

        What its parameters name is asked of the model: `open(sequence_length)` fits a model with that option.
        """
        ...


def check_source(spec: DataSpec) -> None:
    """Refuse data that are not there, as far as that shows without reading them; before workers are started, say."""
    check = getattr(spec, "check_source", None)
    if check is not None:
        check()


def check_position(saved: str, here: str) -> None:
    """Refuse a position in data with another fingerprint than those here."""
    if saved != here:
        raise UserError(
            f"data: the saved position is one in data {saved}, these are {here}: "
            "restore the data, their seed and sample size, or start a new run"
        )


def check_batch_size(batch_size: int, num_samples: int | None = None) -> None:
    """Refuse a batch without samples, or with more than there are (None: nobody knows)."""
    if batch_size < 1:
        raise UserError(f"data: batch_size is {batch_size}; choose at least 1")
    if num_samples is not None and batch_size > num_samples:
        raise UserError(
            f"inner.batch_size is {batch_size}, and the data set has {num_samples} training samples: "
            "lower it, or give more data"
        )
