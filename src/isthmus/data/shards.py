"""The shards of a streamed data set, each read in order from any row on, over a source that may fail now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from isthmus.data.bad import BadSamples
from isthmus.data.retry import PAUSES, first_line, is_passing


class Shards:
    """One column of a `datasets.IterableDataset`, shard by shard.

    Args:
        dataset: of any number of columns.
        column: that is read.
        name: of the data, for messages.
        bad: where shards go that cannot be read to their end, and rows without text; they are passed over.
    """

    def __init__(self, dataset: Any, column: str, name: str, bad: BadSamples) -> None:
        self._dataset, self._column, self._name, self._bad = dataset, column, name, bad
        self.num_shards: int = dataset.num_shards

    def open(self, number: int, position: dict[str, Any] | None = None) -> ShardTexts:
        """The texts of a shard, from a position on."""
        shard = self._dataset.shard(num_shards=self.num_shards, index=number)
        return ShardTexts(shard, self._column, f"shard {number} of {self._name}", self._bad, position)

    def columns(self) -> list[str]:
        """The names of the columns of the first row; none where there is no row."""
        for number in range(self.num_shards):
            shard = self._dataset.shard(num_shards=self.num_shards, index=number)
            for row in _patiently(shard, f"shard {number} of {self._name}", self._bad):
                return list(row)
        return []


class ShardTexts:
    """The texts of one shard with the numbers of their rows: an iterator with an exact position."""

    def __init__(
        self, shard: Any, column: str, name: str, bad: BadSamples, position: dict[str, Any] | None = None
    ) -> None:
        self._shard, self._column, self._name, self._bad = shard, column, name, bad
        self._num_rows, self._position = 0, position
        if position is not None:
            self._num_rows = position["rows"]
            shard.load_state_dict(position["dataset"])
        self._rows = _patiently(shard, name, bad, self._num_rows)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Itself."""
        return self

    def __next__(self) -> tuple[int, str]:
        """Number and text of the next row that has a text."""
        while True:
            row = next(self._rows)
            number, self._num_rows, self._position = self._num_rows, self._num_rows + 1, None
            text = row.get(self._column)
            if isinstance(text, str):
                return number, text
            self._bad.add(
                f"row {number} of {self._name}", TypeError(f"its {self._column} is {type(text).__name__}, not text")
            )

    def state_dict(self) -> dict[str, Any] | None:
        """The position after the last row, as plain values; None at the beginning."""
        if self._num_rows == 0 or self._position is not None:
            return self._position
        return {"rows": self._num_rows, "dataset": self._shard.state_dict()}


def _patiently(shard: Any, name: str, bad: BadSamples, num_rows: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a shard. A source that fails for a moment is asked again, from the row where it failed."""
    failures = 0
    while True:
        try:
            for row in shard:
                num_rows, failures = num_rows + 1, 0
                yield row
        except Exception as error:  # file systems and readers raise whatever their libraries raise
            if failures == len(PAUSES) or not is_passing(error):
                bad.add(f"{name} from row {num_rows} on", error)
                return
            pause, failures = PAUSES[failures], failures + 1
            with suppress(OSError):  # the log's disk is full
                print(f"data: {name}: {first_line(error)}; asked again in {pause:g} s", file=sys.stderr, flush=True)
            time.sleep(pause)
            if num_rows:
                shard.load_state_dict(shard.state_dict())
        else:
            return
