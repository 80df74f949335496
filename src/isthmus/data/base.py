"""The contract of data: a data_set is one endless line of training samples for all workers, and a validation set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from isthmus.inner.step import Batch


class Batches(Protocol):
    """Endless batches for one worker, with an exact position that can be saved and restored."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens a batch trains on; images or seconds of sound, where there are no tokens."""
        ...

    def __iter__(self) -> Self:
        """Itself."""
        ...

    def __next__(self) -> Batch:
        """The next batch; never ends."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position."""
        ...


class SampleOrder(Protocol):
    """One endless line of samples, epoch after epoch, shuffled alike for all workers, who share it out."""

    @property
    def fingerprint(self) -> str:
        """Differs where a position stands for another sample: other data, sequence length or seed."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """Tokens a sample trains on."""
        ...

    def read(self, positions: npt.NDArray[np.int64]) -> Batch:
        """The samples at these positions of the line ([batch], not negative), in their order."""
        ...


class DataSet(Protocol):
    """Opened data."""

    @property
    def sizes(self) -> dict[str, int]:
        """What a model must have at least, by the names of its options: {"vocab_size": 256}."""
        ...

    def sample_order(self, seed: int = 0) -> SampleOrder:
        """All training samples, in the order that `seed` chooses."""
        ...

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """A fixed set of batches, equal on all workers and in all runs, with at most `num_samples` samples."""
        ...


class DataSpec(Protocol):
    """A description of data: a frozen dataclass whose fields are its options."""

    @property
    def open(self) -> Callable[..., DataSet]:
        """Finds and reads the data.

        What its parameters name is asked of the model: `open(sequence_length)` fits a model with that option.
        """
        ...
