"""Images and recordings that are read as they come: a row a sample, shuffled in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.sample_order import Decoder
from isthmus.data.shards import Row
from isthmus.data.shuffle import derive, permute
from isthmus.data.streaming import PrefetchedBatches, StreamedBatches, StreamedDataSet
from isthmus.inner.step import Batch

BLOCK_ROWS = 256  # that are shuffled together: what is kept in memory, as files
_AHEAD = 2  # batches, which are large


@dataclass(frozen=True)
class StreamedRows(StreamedDataSet):
    """Samples of which each is a row, made by the decoder; rows that are damaged are passed over."""

    decoder: Decoder

    @override
    def batches(self, seed: int, batch_size: int, worker: int, num_workers: int) -> PrefetchedBatches:
        return PrefetchedBatches(RowBatches(self, seed, batch_size, worker, num_workers), _AHEAD)

    @override
    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        rows, samples = self.held_out_rows(), list[Any]()
        while some := list(islice(rows, num_samples - len(samples))):
            samples += self.decode(some, [None] * len(some))
        if not samples:
            raise UserError("data: there are no validation samples; give more data, or a validation_split")
        return [self.decoder.batch(samples[i : i + batch_size]) for i in range(0, len(samples), batch_size)]

    def decode(self, rows: Sequence[Row], seeds: Sequence[int | None]) -> list[Any]:
        """Return the samples of rows, in their order, without those that are damaged."""
        names, files = [row.name for row in rows], [lambda row=row: row.value for row in rows]
        return [each for each in self.decoder.map(self.decoder.sample, names, files, seeds) if each is not None]


class RowBatches(StreamedBatches[StreamedRows]):
    """One worker's batches of rows, in an order that depends on the seed and the epoch.

    The rows of a piece are shuffled block by block. A position is where the present block begins, and which of its rows
    were taken: so it is small, and exact, as the block is read again. Which rows make up a block, their order, and what
    is random about a sample depend on the piece alone, not on the worker.
    """

    unit = "sample"
    _block: tuple[Row, ...] = ()  # what is not taken of it, in its order

    @override
    def read_batch(self) -> Batch:
        samples: list[Any] = []
        while len(samples) < self.batch_size:
            while not self._block:
                self._next_block()
            size = self.batch_size - len(samples)
            rows, self._block = self._block[:size], self._block[size:]
            piece = self._pieces[0]
            self._pieces[0] = {**piece, "taken": [*piece["taken"], *(row.number for row in rows)]}
            if decoded := self.data_set.decode(rows, [derive(2**62, self._key(row)) for row in rows]):
                self._idle_epochs = 0
            samples += decoded
        return self.data_set.decoder.batch(samples)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._block = ()

    def _next_block(self) -> None:
        """Read what follows the last block; at the end of a piece there is nothing."""
        if not self._pieces:
            self._begin_epoch()
        self._move_position(taken=[])
        rows = list(islice(self._own_rows(), BLOCK_ROWS))
        if not rows:
            self._end_piece()
            return
        taken = set(self._pieces[0]["taken"])
        order = permute(np.arange(len(rows)), len(rows), f"{self._key(rows[0])}/rows")
        self._block = tuple(rows[i] for i in order if rows[i].number not in taken)

    def _key(self, row: Row) -> str:
        """The key of what is random about a row of the first piece."""
        piece = self._pieces[0]
        return f"{self.seed}/{piece['epoch']}/{piece['shard']}/{row.number}"
