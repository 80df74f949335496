"""Data that are read as they come: each worker its own shards, epoch after epoch, ahead, from exact positions on."""

from __future__ import annotations

import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, ClassVar, Generic, Never, Self, TypeVar

from isthmus.core.types import UserError
from isthmus.data.base import Batches, check_batch_size, check_position
from isthmus.data.shards import Row, ShardPiece, ShardRows, Shards, assign_shards
from isthmus.data.source import Source, SourceOptions, find_sources
from isthmus.data.validation import rows_between_held_out
from isthmus.inner.step import Batch

_IDLE_EPOCHS = 10  # without a sample, until a worker gives up
_GOODBYE_SECONDS = 10.0  # for a thread that hangs on the network when the program ends


@dataclass(frozen=True)
class StreamedDataSet(ABC):
    """Data that can only be read in order; see `base.DataSet`.

    Attributes:
        name: of the data, for messages.
        train: the shards to train on.
        held_out: the shards to evaluate with.
        every: which rows of `train` are held out instead, where `held_out` is `train`: every so many; 0: none.
        sizes: the least that a model must have, as far as it is known before reading.
        tokens_per_sample: what a sample counts for: tokens, 1 for an image, seconds of sound.
        form: plain values on which a sample depends beside the rows.
    """

    name: str
    train: Shards
    held_out: Shards
    every: int
    sizes: dict[str, int]
    tokens_per_sample: int
    form: tuple[object, ...]

    def holds_out(self, row: int) -> bool:
        """Tell whether a row of `train` is kept for validation."""
        return self.every > 0 and row % self.every == 0

    def held_out_rows(self) -> Iterator[Row]:
        """Yield the rows of the validation data, shard after shard."""
        for number in range(self.held_out.num_shards):
            for row in self.held_out.open(number):
                if self.every == 0 or self.holds_out(row.number):
                    yield row

    @abstractmethod
    def batches(self, seed: int, batch_size: int, worker: int, num_workers: int) -> PrefetchedBatches:
        """Return the batches of one worker, read ahead."""

    @abstractmethod
    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Return the first samples of the validation data, `num_samples` at most."""

    def sample_order(self, seed: int = 0) -> Never:
        """Refuse: what is streamed has no samples by number, so nobody can say which comes when."""
        raise UserError(
            "data: workers that come and go share samples by number, which streamed data do not have: "
            "set data.streaming to false, or outer.transport.type to torch_dist"
        )

    def fingerprint(self, seed: int) -> str:
        """Return what differs where a position stands for another sample, as far as that shows without reading."""
        parts = [self.name, self.train.num_shards, self.every, *self.form, seed]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def open_shards(options: SourceOptions, load: Callable[[Source], Shards]) -> tuple[str, Shards, Shards, int]:
    """Return the first four fields of a `StreamedDataSet`: its name, shards to train on and evaluate with, `every`."""
    source, held_out = find_sources(options)
    train = load(source)
    name = f"{source.name}:{source.split}"
    if held_out is None:
        return name, train, train, rows_between_held_out(options.validation_fraction)
    return name, train, load(held_out), 0


Data = TypeVar("Data", bound=StreamedDataSet)


class StreamedBatches(ABC, Generic[Data]):
    """The batches of one worker, which reads its pieces of an epoch one after the other, then begins the next epoch."""

    unit: ClassVar[str]  # what it looks for, for messages

    def __init__(self, data_set: Data, seed: int, batch_size: int, worker: int, num_workers: int) -> None:
        check_batch_size(batch_size)
        self.data_set, self.seed, self.batch_size = data_set, seed, batch_size
        self.tokens_per_batch = batch_size * data_set.tokens_per_sample
        self._fingerprint = data_set.fingerprint(seed)
        self._worker, self._num_workers = worker, num_workers
        self._epoch, self._idle_epochs = -1, 0
        self._epochs_of_batch = 0  # begun since the last batch was taken
        self._pieces: list[ShardPiece] = []  # the first is being read
        self._rows: ShardRows | None = None  # of the first piece's shard, once it is opened

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch."""
        self._epochs_of_batch = 0
        return self.read_batch()

    @abstractmethod
    def read_batch(self) -> Batch:
        """Read the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position; it becomes wrong with no later batch."""
        return {
            "fingerprint": self._fingerprint,
            "seed": self.seed,
            "num_shards": self.data_set.train.num_shards,
            "epoch": self._epoch,
            "pieces": list(self._pieces),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; refuses one in other data."""
        check_position(state_dict["fingerprint"], self._fingerprint)
        self._epoch, self._pieces, self._rows = state_dict["epoch"], list(state_dict["pieces"]), None

    def _own_rows(self) -> Iterator[Row]:
        """The rows that are still to come of the first piece."""
        piece = self._pieces[0]
        if self._rows is None:
            self._rows = self.data_set.train.open(piece["shard"], piece["position"])
        for row in self._rows:
            if row.number % piece["parts"] == piece["part"] and not self.data_set.holds_out(row.number):
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
                f"data: worker {self._worker} found no {self.unit} in {self.data_set.name!r}, {_IDLE_EPOCHS} epochs "
                "long: give more data than validation takes"
            )
        if self._epochs_of_batch > 1 and not self._idle_epochs:  # a whole one was not enough
            raise UserError(
                f"data: worker {self._worker} has read all of {self.data_set.name!r} and found fewer than "
                f"{self.batch_size} samples: lower inner.batch_size, or give more data"
            )
        self._idle_epochs += 1
        self._epochs_of_batch += 1
        self._epoch += 1
        num_shards = self.data_set.train.num_shards
        self._pieces = assign_shards(num_shards, self.seed, self._epoch, self._worker, self._num_workers)


class PrefetchedBatches:
    """Batches read ahead in a thread; the position is that of what was taken, not of what was read.

    Args:
        batches: nobody else may read them.
        ahead: how many are read before they are asked for.
    """

    def __init__(self, batches: Batches, ahead: int = 4) -> None:
        self.tokens_per_batch = batches.tokens_per_batch
        self._batches, self._ahead = batches, ahead
        self._position = batches.state_dict()
        self._stop: weakref.finalize[Any, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise what reading it raised."""
        if self._stop is None:
            self._start()
        item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        batch, self._position = item
        result: Batch = batch
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken."""
        return self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; what was read ahead is forgotten."""
        self.close()
        self._batches.load_state_dict(state_dict)
        self._position = self._batches.state_dict()

    def close(self) -> None:
        """End the thread, and go back to the position of what was taken; the next batch starts another thread."""
        if self._stop is not None:
            self._stop()
            self._stop = None
            self._batches.load_state_dict(self._position)

    def _start(self) -> None:
        self._queue: Queue[Any] = Queue(self._ahead)
        stopping = threading.Event()
        thread = threading.Thread(target=_fill, args=(self._batches, self._queue, stopping), daemon=True, name="data")
        thread.start()
        # also called at the end of the program: a thread in the middle of a library would take it down
        self._stop = weakref.finalize(self, _end, thread, self._queue, stopping)


def _fill(batches: Batches, queue: Queue[Any], stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            item: Any = (next(batches), batches.state_dict())
        except Exception as error:  # it is raised where the batch is asked for
            queue.put(error)
            return
        queue.put(item)


def _end(thread: threading.Thread, queue: Queue[Any], stopping: threading.Event) -> None:
    stopping.set()
    try:
        while True:  # it may be waiting for a free place
            queue.get_nowait()
    except Empty:
        thread.join(_GOODBYE_SECONDS)
