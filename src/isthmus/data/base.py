"""The contract of data: a corpus opens streams keyed by worker id, and holds a fixed validation set."""

from __future__ import annotations

from typing import Any, Protocol, Self

from isthmus.inner.step import Batch


class Stream(Protocol):
    """Endless batches for one worker, with an exact position that can be saved and restored."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens a batch trains on."""
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


class Corpus(Protocol):
    """Opened data."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        ...

    def stream(self, worker: int, batch_size: int, seed: int = 0) -> Stream:
        """The training batches of worker number `worker`: the same whatever the number of workers."""
        ...

    def validation(self, batch_size: int, num_sequences: int = 256) -> list[Batch]:
        """A fixed set of batches, equal on all workers and in all runs, with at most `num_sequences` samples."""
        ...


class DataSpec(Protocol):
    """A description of data: a frozen dataclass whose fields are its options."""

    def open(self, sequence_length: int) -> Corpus:
        """Find and read the data, cut into samples of `sequence_length` tokens."""
        ...
