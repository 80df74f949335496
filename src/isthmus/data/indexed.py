"""Samples that are found by number: images in a folder, recordings, rows of a table."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from isthmus.core.types import UserError
from isthmus.data.shuffle import permute
from isthmus.inner.step import Batch

Indices = npt.NDArray[np.int64]  # [batch]


class IndexedSamples(Protocol):
    """Samples by number."""

    @property
    def fingerprint(self) -> str:
        """Differs where a number stands for another sample."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """What a sample counts for: 1 for an image, tokens or seconds of sound."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, indices: Indices, seeds: Indices | None) -> Batch:
        """These samples in their order, all in one shape; altered at random by `seeds`, one each, where given."""
        ...


class IndexedOrder:
    """The samples of a source as one endless line, every epoch in an order of its own, drawn from (seed, epoch)."""

    def __init__(self, source: IndexedSamples, seed: int) -> None:
        self._source, self._seed = source, seed
        self.tokens_per_sample = source.tokens_per_sample
        text = f"{source.fingerprint} {len(source)} {seed}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, positions: Indices) -> Batch:
        """The samples at these positions; what is random about them depends on seed and position alone."""
        epochs, places = np.divmod(positions, len(self._source))
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(places[here], len(self._source), f"{self._seed}/{epoch}")
        return self._source.read(indices, positions + self._seed * 0x9E3779B97F4A7C15 % 2**62)


class IndexedDataSet:
    """Training and validation samples.

    Args:
        train: the samples to train on.
        validation: the samples to evaluate with, read without anything random.
        sizes: what a model must have at least, by the names of its options.
    """

    def __init__(self, train: IndexedSamples, validation: IndexedSamples, sizes: dict[str, int]) -> None:
        for name, source in (("training", train), ("validation", validation)):
            if len(source) == 0:
                raise UserError(f"data: there are no {name} samples; give more data, or another validation_fraction")
        self.train, self.held_out, self.sizes = train, validation, sizes

    def sample_order(self, seed: int = 0) -> IndexedOrder:
        """All training samples, in the order that `seed` chooses."""
        return IndexedOrder(self.train, seed)

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """SampleOrder spread evenly over the validation data; all of them where they are fewer than asked for."""
        size = len(self.held_out)
        chosen = np.linspace(0, size - 1, min(num_samples, size)).astype(np.int64)
        return [self.held_out.read(chosen[i : i + batch_size], None) for i in range(0, len(chosen), batch_size)]
