"""Samples that are found by number, the one endless order in which all are read, and workers that share it out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.base import Batches, DataSet, Positions, SampleOrder, check_batch_size, check_position
from isthmus.data.errors import ErrorBudget
from isthmus.data.shuffle import permute_epochs
from isthmus.data.streaming import StreamedDataSet
from isthmus.inner.step import Batch


@dataclass(frozen=True)
class Decoder:
    """The way from files to samples.

    Attributes:
        decode: makes a sample of what is known of a file, altered at random by the seed where there is one.
        batch: brings samples, at least one, to one shape.
        tokens_per_sample: what a sample counts for: 1 for an image, seconds of sound.
        budget: counts the files that are damaged.
        map: a `map`, perhaps that of a pool of threads.
    """

    decode: Callable[[Any, int | None], Any]
    batch: Callable[[list[Any]], Batch]
    tokens_per_sample: int
    budget: ErrorBudget
    map: Callable[..., Iterable[Any]] = map

    def sample(self, name: str, file: Callable[[], Any], seed: int | None) -> Any:
        """Return the sample of a file that messages call so, or None where it is damaged."""
        try:
            return self.decode(file(), seed)
        except UserError:
            raise
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            self.budget.add(name, error)
            return None


@dataclass(frozen=True)
class NumberedSamples:
    """Samples by number. In the place of one that turns out to be damaged stands the next one that is not.

    Whether one is damaged is found out anew at every reading, so that what is read depends on the data alone.

    Attributes:
        names: what messages call the files.
        file: returns by its number what the decoder needs.
        decoder: makes the samples.
        fingerprint: a text that differs where a number stands for another sample.
    """

    names: Sequence[str]
    file: Callable[[int], Any]
    decoder: Decoder
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tokens_per_sample(self) -> int:
        """The tokens, images or seconds of sound that a sample counts for."""
        return self.decoder.tokens_per_sample

    def read(self, numbers: Positions, seeds: Positions | None) -> Batch:
        """Return these samples, altered at random by `seeds`, one each, where given."""
        chosen = [None] * len(numbers) if seeds is None else seeds.tolist()
        return self.decoder.batch(list(self.decoder.map(self._sample, numbers.tolist(), chosen)))

    def _sample(self, number: int, seed: int | None) -> Any:
        for other in chain(range(number, len(self)), range(number)):
            sample = self.decoder.sample(self.names[other], partial(self.file, other), seed)
            if sample is not None:
                return sample
        raise UserError("data: none of the samples can be read; mend the data")


class ShuffledOrder:
    """Numbered samples in one endless order, which is another one in every epoch, drawn from (seed, epoch)."""

    def __init__(self, samples: NumberedSamples, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self.num_samples, self.tokens_per_sample = len(samples), samples.tokens_per_sample
        text = f"{samples.fingerprint} {len(samples)} {seed}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, positions: Positions) -> Batch:
        """Return the samples at these positions; what is random about them depends on seed and position alone."""
        _, numbers = permute_epochs(positions, self.num_samples, self._seed)
        return self._samples.read(numbers, positions + self._seed * 0x9E3779B97F4A7C15 % 2**62)


class NumberedDataSet:
    """Numbered samples to train on, and to evaluate with, which are read without anything random."""

    def __init__(self, train: NumberedSamples, validation: NumberedSamples, sizes: dict[str, int]) -> None:
        for name, samples in (("training", train), ("validation", validation)):
            if len(samples) == 0:
                raise UserError(f"data: there are no {name} samples; give more data, or another validation_fraction")
        self.train, self.held_out, self.sizes = train, validation, sizes

    def sample_order(self, seed: int = 0) -> ShuffledOrder:
        """Return all training samples, in the order that `seed` chooses."""
        return ShuffledOrder(self.train, seed)

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Return samples spread evenly over the validation data; all of them where they are fewer than asked for."""
        size = len(self.held_out)
        chosen = np.linspace(0, size - 1, min(num_samples, size)).astype(np.int64)
        return [self.held_out.read(chosen[i : i + batch_size], None) for i in range(0, len(chosen), batch_size)]


class OrderedBatches:
    """The batches of worker w of W, who are always the same: every W-th of the order, so all samples are read once."""

    def __init__(self, order: SampleOrder, batch_size: int, worker: int = 0, num_workers: int = 1) -> None:
        check_batch_size(batch_size, order.num_samples)
        self.tokens_per_batch = batch_size * order.tokens_per_sample
        self._order, self._batch_size = order, batch_size
        self._worker, self._num_workers = worker, num_workers
        self._position = 0  # in the order, where all workers' next batches begin

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; one may join the ends of two epochs."""
        first = self._position + self._worker * self._batch_size
        self._position += self._num_workers * self._batch_size
        return self._order.read(np.arange(first, first + self._batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which does not depend on the worker, and what it is a position in."""
        return {"position": self._position, "fingerprint": self._order.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, of any worker among any number; refuse one in other data."""
        check_position(state_dict["fingerprint"], self._order.fingerprint)
        self._position = state_dict["position"]


def open_batches(data_set: DataSet, seed: int, batch_size: int, worker: int, num_workers: int) -> Batches:
    """Return one worker's batches: of its own shards, where data can only be read in order, else of the shared one."""
    if isinstance(data_set, StreamedDataSet):
        return data_set.batches(seed, batch_size, worker, num_workers)
    return OrderedBatches(data_set.sample_order(seed), batch_size, worker, num_workers)
