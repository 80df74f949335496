"""The shards of a streamed data set: who reads which, and their rows in order, from a source that fails at times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from isthmus.core.types import first_line
from isthmus.data.errors import PAUSES, ErrorBudget, is_passing
from isthmus.data.shuffle import permute

_log = logging.getLogger(__name__)

Read = Callable[[dict[str, Any], str], Any]  # (columns of a row, the row's name) -> what it holds

# {"epoch", "shard", "part", "parts", "position", "taken"}: every parts-th row of a shard, not yet read to its end; what
# is left begins at the position, but for the rows with the numbers `taken`
ShardPiece = dict[str, Any]


def assign_shards(num_shards: int, seed: int, epoch: int, worker: int, num_workers: int) -> list[ShardPiece]:
    """Return one worker's pieces of an epoch, in the order in which it reads them; disjoint, and together everything.

    A piece is a whole shard where every worker can have one; else every k-th row of a shard, which then k workers read.
    """
    parts = -(-num_workers // num_shards)
    size = num_shards * parts
    mine = permute(np.arange(size), size, f"{seed}/{epoch}/shards")[worker::num_workers].tolist()
    return [
        {"epoch": epoch, "shard": i // parts, "part": i % parts, "parts": parts, "position": None, "taken": []}
        for i in mine
    ]


def reassign_shards(states: list[dict[str, Any]], num_workers: int) -> list[dict[str, Any]]:
    """Return positions for another number of workers. Together they stand where the former ones stood.

    What is unread of the epochs that were begun is shared out. Who then has nothing begins the next epoch.

    Args:
        states: the saved positions of all workers, in their order, after the same step.
        num_workers: how many workers go on; each gets one of the states that are returned.
    """
    first, latest = states[0], max(state["epoch"] for state in states)
    num_shards, seed = first["num_shards"], first["seed"]
    pieces = [piece for state in states for piece in state["pieces"]]
    for worker, state in enumerate(states):  # who was behind had the rest of these epochs still to come
        for epoch in range(state["epoch"] + 1, latest + 1):
            pieces += assign_shards(num_shards, seed, epoch, worker, len(states))
    return [
        {**first, "epoch": latest, "pieces": pieces[worker::num_workers], **_tokens(states, worker, num_workers)}
        for worker in range(num_workers)
    ]


class Row(NamedTuple):
    """One row of a shard."""

    number: int  # in its shard
    name: str  # for messages
    value: Any  # what it holds


class Shards:
    """A `datasets.IterableDataset`, shard by shard.

    Args:
        dataset: of any columns.
        read: what a row holds, or None where it is passed over; raises TypeError or OSError where it does not hold what
            it must. The row's name is for its messages.
        name: of the data, for messages.
        budget: where shards go that cannot be read to their end, and rows that `read` refuses; they are passed over.
    """

    def __init__(self, dataset: Any, read: Read, name: str, budget: ErrorBudget) -> None:
        self._dataset, self._read, self._name, self._budget = dataset, read, name, budget
        self.num_shards: int = dataset.num_shards
        self.features = dataset.features  # of its columns, by name; None where they are not known before reading

    def open(self, number: int, position: dict[str, Any] | None = None) -> ShardRows:
        """Return the rows of a shard, from a position on."""
        shard = self._dataset.shard(num_shards=self.num_shards, index=number)
        return ShardRows(shard, self._read, f"shard {number} of {self._name}", self._budget, position)

    def columns(self) -> list[str]:
        """Return the names of the columns of the first row; none where there is no row."""
        rows = (columns for number in range(self.num_shards) for columns in self.open(number).columns)
        return list(next(rows, []))


class ShardRows:
    """The rows of one shard that hold something: an iterator with an exact position."""

    def __init__(
        self, shard: Any, read: Read, name: str, budget: ErrorBudget, position: dict[str, Any] | None = None
    ) -> None:
        self._shard, self._read, self._name, self._budget = shard, read, name, budget
        self._num_rows, self._position = 0, position  # the position of a restored one counts until it is read on
        if position is not None:
            self._num_rows = position["rows"]
            shard.load_state_dict(position["dataset"])
        self.columns = _patiently(shard, name, budget, self._num_rows)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        while True:
            columns = next(self.columns)
            number, self._num_rows, self._position = self._num_rows, self._num_rows + 1, None
            name = f"row {number} of {self._name}"
            try:
                value = self._read(columns, name)
            except (TypeError, OSError) as error:
                self._budget.add(name, error)
                continue
            if value is not None:
                return Row(number, name, value)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position after the last row, as plain values; None at the beginning."""
        if self._num_rows == 0 or self._position is not None:
            return self._position
        return {"rows": self._num_rows, "dataset": self._shard.state_dict()}


def _patiently(shard: Any, name: str, budget: ErrorBudget, num_rows: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a shard. A source that fails for a moment is asked again, from the row where it failed."""
    failures = 0
    while True:
        try:
            for row in shard:
                num_rows, failures = num_rows + 1, 0
                yield row
        except Exception as error:  # file systems and readers raise whatever their libraries raise
            if failures == len(PAUSES) or not is_passing(error):
                budget.add(f"{name} from row {num_rows} on", error)
                return
            pause, failures = PAUSES[failures], failures + 1
            _log.warning("data: %s failed (%s): it is asked again in %g s", name, first_line(error), pause)
            time.sleep(pause)
            if num_rows:
                shard.load_state_dict(shard.state_dict())
        else:
            return


def _tokens(states: list[dict[str, Any]], worker: int, num_workers: int) -> dict[str, torch.Tensor]:
    """A worker's share of the text that was read and not yet taken; nothing where positions go back to the rows."""
    if "windows" not in states[0]:
        return {}
    windows = torch.cat([state["windows"] for state in states])
    rests = [state["rest"] for state in states]
    return {
        "windows": windows[worker::num_workers].contiguous(),
        "rest": torch.cat([windows.new_empty(0), *rests[worker::num_workers]]),
    }
