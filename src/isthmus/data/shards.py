"""The shards of a streamed data set, each read in order from any row on, over a source that may fail now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from isthmus.data.bad import ErrorBudget
from isthmus.data.retry import PAUSES, first_line, is_passing

Read = Callable[[dict[str, Any], str], Any]  # (columns of a row, its place) -> what it holds


class Row(NamedTuple):
    """One row."""

    number: int  # in its shard
    place: str  # for messages
    value: Any  # what it holds


class Shards:
    """A `datasets.IterableDataset`, shard by shard.

    Args:
        dataset: of any columns.
        read: what a row holds, or None where it is passed over; raises TypeError or OSError where it does not hold what
            it must. The row's place is for its messages.
        name: of the data, for messages.
        bad: where shards go that cannot be read to their end, and rows that `read` refuses; they are passed over.
    """

    def __init__(self, dataset: Any, read: Read, name: str, bad: ErrorBudget) -> None:
        self._dataset, self._read, self._name, self._bad = dataset, read, name, bad
        self.num_shards: int = dataset.num_shards
        self.features = dataset.features  # of its columns, by name; None where they are not known before reading

    def open(self, number: int, position: dict[str, Any] | None = None) -> ShardRows:
        """The rows of a shard, from a position on."""
        shard = self._dataset.shard(num_shards=self.num_shards, index=number)
        return ShardRows(shard, self._read, f"shard {number} of {self._name}", self._bad, position)

    def columns(self) -> list[str]:
        """The names of the columns of the first row; none where there is no row."""
        for number in range(self.num_shards):
            shard = self._dataset.shard(num_shards=self.num_shards, index=number)
            for row in _patiently(shard, f"shard {number} of {self._name}", self._bad):
                return list(row)
        return []


class ShardRows:
    """The rows of one shard: an iterator with an exact position."""

    def __init__(
        self, shard: Any, read: Read, name: str, bad: ErrorBudget, position: dict[str, Any] | None = None
    ) -> None:
        self._shard, self._read, self._name, self._bad = shard, read, name, bad
        self._num_rows, self._position = 0, position
        if position is not None:
            self._num_rows = position["rows"]
            shard.load_state_dict(position["dataset"])
        self._rows = _patiently(shard, name, bad, self._num_rows)

    def __iter__(self) -> Iterator[Row]:
        """Itself."""
        return self

    def __next__(self) -> Row:
        """The next row that holds something."""
        while True:
            columns = next(self._rows)
            number, self._num_rows, self._position = self._num_rows, self._num_rows + 1, None
            place = f"row {number} of {self._name}"
            try:
                value = self._read(columns, place)
            except (TypeError, OSError) as error:
                self._bad.add(place, error)
                continue
            if value is not None:
                return Row(number, place, value)

    def state_dict(self) -> dict[str, Any] | None:
        """The position after the last row, as plain values; None at the beginning."""
        if self._num_rows == 0 or self._position is not None:
            return self._position
        return {"rows": self._num_rows, "dataset": self._shard.state_dict()}


def _patiently(shard: Any, name: str, bad: ErrorBudget, num_rows: int = 0) -> Iterator[dict[str, Any]]:
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
