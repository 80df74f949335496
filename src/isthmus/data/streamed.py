"""What is read as it comes: each worker its own shards, epoch after epoch, with a position that can be saved."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Never, Self

from isthmus.core.types import UserError
from isthmus.data.deal import ShardPart, assign_shards
from isthmus.data.hub import Source
from isthmus.data.prefetch import PrefetchedBatches
from isthmus.data.shards import Row, ShardRows, Shards
from isthmus.inner.step import Batch

_IDLE_EPOCHS = 10  # without a sample, until a worker gives up


@dataclass(frozen=True)
class StreamedSplits:
    """Shards to train on and to evaluate with.

    Attributes:
        train: shards to train on.
        held_out: shards to evaluate with.
        every: which rows of `train` are held out instead, where `held_out` is `train`: every so many; 0: none.
        name: of the data, for messages.
    """

    train: Shards
    held_out: Shards
    every: int
    name: str

    def holds_out(self, row: int) -> bool:
        """Whether a row of `train` is one of the validation data."""
        return self.every > 0 and row % self.every == 0

    def held_out_rows(self) -> Iterator[Row]:
        """The rows of the validation data, shard after shard."""
        for number in range(self.held_out.num_shards):
            for row in self.held_out.open(number):
                if self.every == 0 or self.holds_out(row.number):
                    yield row


def open_splits(
    place: Source, held_out_place: Source | None, fraction: float, load_shards: Callable[[Source], Shards]
) -> StreamedSplits:
    """A split each, or every so many rows of one.

    Args:
        place: of the training data.
        held_out_place: of the validation data, where they have one of their own.
        fraction: of the rows that is held out, where they have none.
        load_shards: finds those of a place.
    """
    train = load_shards(place)
    held_out = train if held_out_place is None else load_shards(held_out_place)
    every = max(2, round(1 / fraction)) if held_out_place is None else 0
    return StreamedSplits(train, held_out, every, f"{place.name}:{place.split}")


@dataclass(frozen=True)
class StreamedDataSet(ABC):
    """Data that can only be read in order."""

    sides: StreamedSplits

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """What a model must have at least."""

    @property
    @abstractmethod
    def tokens_per_sample(self) -> int:
        """What a sample counts for."""

    @property
    @abstractmethod
    def form(self) -> tuple[object, ...]:
        """On what a sample depends beside the rows, as plain values."""

    @abstractmethod
    def stream(self, seed: int, batch_size: int, worker: int, num_workers: int) -> PrefetchedBatches:
        """Worker `worker`'s batches, read ahead."""

    @abstractmethod
    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """The first samples of the validation data, `num_samples` at most."""

    def sample_order(self, seed: int = 0) -> Never:
        """There is no line: a stream has no samples by number."""
        raise UserError(
            "data: workers that come and go share samples by number, which streamed data do not have: "
            "set data.streaming to false, or outer.transport.type to torch_dist"
        )

    def fingerprint(self, seed: int) -> str:
        """Differs where a position stands for another sample, as far as can be said without reading the data."""
        sides = self.sides
        parts = [sides.name, sides.train.num_shards, sides.every, *self.form, seed]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class StreamedBatches(ABC):
    """One worker's batches. It reads its pieces of an epoch one after the other, then begins the next epoch.

    Args:
        data_set: the data.
        seed: of all that is random.
        batch_size: samples a batch.
        worker: number of this worker, from 0.
        num_workers: that share the data.
    """

    unit: ClassVar[str]  # what it looks for, for messages

    def __init__(self, data_set: StreamedDataSet, seed: int, batch_size: int, worker: int, num_workers: int) -> None:
        if batch_size < 1:
            raise UserError(f"data: batch_size is {batch_size}; choose at least 1")
        self.tokens_per_batch = batch_size * data_set.tokens_per_sample
        self._sides, self._fingerprint = data_set.sides, data_set.fingerprint(seed)
        self._seed, self._batch_size = seed, batch_size
        self._worker, self._num_workers = worker, num_workers
        self._epoch, self._idle_epochs = -1, 0
        self._pieces: list[ShardPart] = []  # the first is being read
        self._rows: ShardRows | None = None  # of the first piece's shard, once it is opened

    def __iter__(self) -> Self:
        """Itself."""
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch."""

    def state_dict(self) -> dict[str, Any]:
        """The position; it becomes wrong with no later batch."""
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "num_shards": self._sides.train.num_shards,
            "epoch": self._epoch,
            "pieces": list(self._pieces),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; refuses one in other data."""
        if state_dict["fingerprint"] != self._fingerprint:
            raise UserError(
                f"data: the saved position is one in data {state_dict['fingerprint']}, these are {self._fingerprint}: "
                "restore the data, their seed and sample size, or start a new run"
            )
        self._epoch, self._pieces, self._rows = state_dict["epoch"], list(state_dict["pieces"]), None

    def _own_rows(self) -> Iterator[Row]:
        """Those that are still to come of the first piece."""
        piece = self._pieces[0]
        if self._rows is None:
            self._rows = self._sides.train.open(piece["shard"], piece["position"])
        for row in self._rows:
            if row.number % piece["parts"] == piece["part"] and not self._sides.holds_out(row.number):
                yield row

    def _move_position(self, **more: Any) -> None:
        """The first piece goes on after the last row that was read of it."""
        if self._rows is not None:
            self._pieces[0] = {**self._pieces[0], "position": self._rows.state_dict(), **more}

    def _end_piece(self) -> None:
        del self._pieces[0]
        self._rows = None

    def _begin_epoch(self) -> None:
        if self._idle_epochs == _IDLE_EPOCHS:
            raise UserError(
                f"data: worker {self._worker} found no {self.unit} in {self._sides.name!r}, {_IDLE_EPOCHS} epochs "
                "long: give more data than validation takes"
            )
        self._idle_epochs += 1
        self._epoch += 1
        self._pieces = assign_shards(
            self._sides.train.num_shards, self._seed, self._epoch, self._worker, self._num_workers
        )
