"""Images and recordings that are read as they come: a row a sample, shuffled in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.errors import ErrorBudget
from isthmus.data.shards import Row
from isthmus.data.shuffle import derive, permute
from isthmus.data.streaming import PrefetchedBatches, StreamedBatches, StreamedDataSet
from isthmus.inner.step import Batch

_BLOCK_ROWS = 256  # that are shuffled together: what is kept in memory, as files
_AHEAD = 2  # batches, which are large


class RowReader(Protocol):
    """What a row must hold, and how it becomes a sample."""

    @property
    def tokens_per_sample(self) -> int:
        """What a sample counts for: 1 for an image, seconds of sound."""
        ...

    @property
    def form(self) -> tuple[object, ...]:
        """The columns that are read, and what else decides which rows become samples."""
        ...

    def hold(self, columns: dict[str, Any], name: str) -> Any:
        """Return what is kept of a row until its turn comes; None where it is passed over.

        Raises:
            TypeError, OSError: it does not hold what it must.
            UserError: it does not fit the model; the line names the row.
        """
        ...

    def decode(self, held: Any, seed: int | None) -> Any:
        """Return the sample; the seed decides what is random about it. May be called by several threads.

        Raises:
            Exception: whatever libraries raise for a damaged file.
        """
        ...

    def batch(self, samples: list[Any]) -> Batch:
        """Return samples, at least one, in one batch."""
        ...


@dataclass(frozen=True)
class StreamedRows(StreamedDataSet):
    """Samples of which each is a row.

    Attributes:
        splits: the rows, as `reader.hold` keeps them.
        reader: makes samples of them.
        known_sizes: what a model must have at least, as far as it is known before reading.
        budget: where rows go that cannot be decoded; they are passed over.
        map: a `map`, perhaps that of a pool of threads.
    """

    reader: RowReader
    known_sizes: dict[str, int]
    budget: ErrorBudget
    map: Callable[..., Iterable[Any]]

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return self.known_sizes

    @property
    @override
    def tokens_per_sample(self) -> int:
        return self.reader.tokens_per_sample

    @property
    @override
    def form(self) -> tuple[object, ...]:
        return *self.reader.form, _BLOCK_ROWS

    @override
    def batches(self, seed: int, batch_size: int, worker: int, num_workers: int) -> PrefetchedBatches:
        return PrefetchedBatches(RowBatches(self, seed, batch_size, worker, num_workers), _AHEAD)

    @override
    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        rows, samples = self.splits.held_out_rows(), list[Any]()
        while some := list(islice(rows, num_samples - len(samples))):
            samples += self.decode(some, [None] * len(some))
        if not samples:
            raise UserError("data: there are no validation samples; give more data, or a validation_split")
        return [self.reader.batch(samples[i : i + batch_size]) for i in range(0, len(samples), batch_size)]

    def decode(self, rows: list[Row], seeds: list[int] | list[None]) -> list[Any]:
        """Return the samples of rows, in their order, without those that are damaged."""
        return [sample for sample in self.map(self._decode, rows, seeds) if sample is not None]

    def _decode(self, row: Row, seed: int | None) -> Any:
        try:
            return self.reader.decode(row.value, seed)
        except UserError:
            raise
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            self.budget.add(row.name, error)
            return None


class RowBatches(StreamedBatches):
    """One worker's batches of rows, in an order that depends on the seed and the epoch.

    The rows of a piece are shuffled block by block. A position is where the present block begins, and which of its rows
    were taken: so it is small, and exact, as the block is read again. Which rows make up a block, their order, and what
    is random about a sample depend on the piece alone, not on the worker.
    """

    unit = "sample"

    def __init__(self, data_set: StreamedRows, seed: int, batch_size: int, worker: int, num_workers: int) -> None:
        super().__init__(data_set, seed, batch_size, worker, num_workers)
        self._data_set = data_set
        self._block: list[Row] = []  # what is not taken of it, in its order

    @override
    def __next__(self) -> Batch:
        self._epochs_of_batch = 0
        samples: list[Any] = []
        while len(samples) < self._batch_size:
            while not self._block:
                self._next_block()
            size = self._batch_size - len(samples)
            rows, self._block = self._block[:size], self._block[size:]
            piece = self._pieces[0]
            self._pieces[0] = {**piece, "taken": [*piece["taken"], *(row.number for row in rows)]}
            if decoded := self._data_set.decode(rows, [derive(2**62, self._key(row)) for row in rows]):
                self._idle_epochs = 0
            samples += decoded
        return self._data_set.reader.batch(samples)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._block = []

    def _next_block(self) -> None:
        """Read what follows the last block; at the end of a piece there is nothing."""
        if not self._pieces:
            self._begin_epoch()
        self._move_position(taken=[])
        rows = list(islice(self._own_rows(), _BLOCK_ROWS))
        if not rows:
            self._end_piece()
            return
        taken = set(self._pieces[0]["taken"])
        order = permute(np.arange(len(rows)), len(rows), f"{self._key(rows[0])}/rows")
        self._block = [rows[i] for i in order if rows[i].number not in taken]

    def _key(self, row: Row) -> str:
        """The key of what is random about a row of the first piece."""
        piece = self._pieces[0]
        return f"{self._seed}/{piece['epoch']}/{piece['shard']}/{row.number}"


def file_in(cell: dict[str, Any] | None, name: str) -> bytes:
    """Return the bytes of the file that a row holds.

    Raises:
        TypeError: it holds none.
        UserError: it only says where one is.
    """
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise TypeError("it holds no file")
    if cell["bytes"] is None:
        raise UserError(
            f"data: {name!r} only names a file, {cell['path']!r}; streamed files lie in the rows of Parquet, Arrow or "
            "tar files: give such, or set data.streaming to false"
        )
    content: bytes = cell["bytes"]
    return content
