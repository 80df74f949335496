"""Samples from one long array of tokens: windows, packed end to end without padding."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.shuffle import derive, permute
from isthmus.inner.step import Batch

Tokens = npt.NDArray[np.integer[Any]]  # [num_tokens]; `packing.ArrowTokens` is read in the same way


class TokenDataSet:
    """Training and validation tokens, cut into windows of `sequence_length` + 1; neighbours share one token."""

    def __init__(self, train: Tokens, validation: Tokens, sequence_length: int, vocab_size: int) -> None:
        for name, tokens in (("training", train), ("validation", validation)):
            if len(tokens) <= sequence_length:
                raise UserError(
                    f"data: a sequence of {sequence_length} tokens needs {sequence_length + 1}, the {name} data has "
                    f"{len(tokens)}; choose a shorter sequence_length or give more data"
                )
        self.train = train
        self.held_out = validation
        self.sequence_length = sequence_length
        self.sizes = {"vocab_size": vocab_size}

    def sample_order(self, seed: int = 0) -> WindowOrder:
        """All training windows, in the order that `seed` chooses."""
        return WindowOrder(self.train, self.sequence_length, seed)

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Windows spread evenly over the validation tokens; all of them where they are fewer than asked for."""
        num_windows = (len(self.held_out) - 1) // self.sequence_length
        chosen = np.linspace(0, num_windows - 1, min(num_samples, num_windows)).astype(np.int64)
        return [
            cut_windows(self.held_out, chosen[start : start + batch_size] * self.sequence_length, self.sequence_length)
            for start in range(0, len(chosen), batch_size)
        ]


class WindowOrder:
    """The windows of the training tokens as one endless line.

    An epoch is a permutation of as many windows as fit wherever the first one starts, which, like the permutation, is
    drawn from (seed, epoch).
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int) -> None:
        self.tokens_per_sample = sequence_length
        self._tokens = tokens
        self._seed = seed
        self.num_samples = max(1, len(tokens) // sequence_length - 1)  # of an epoch
        self._num_offsets = min(sequence_length, len(tokens) - self.num_samples * sequence_length)
        self.fingerprint = self._hash()

    def read(self, positions: npt.NDArray[np.int64]) -> Batch:
        """{"tokens": [len(positions), sequence_length + 1] int64}."""
        epochs, indices = np.divmod(positions, self.num_samples)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here, key = epochs == epoch, f"{self._seed}/{epoch}"
            windows = permute(indices[here], self.num_samples, key)
            starts[here] = derive(self._num_offsets, f"{key}/offset") + windows * self.tokens_per_sample
        return cut_windows(self._tokens, starts, self.tokens_per_sample)

    def _hash(self) -> str:
        """Of the shape and of 64 samples of the first epoch: little is read of data that is mapped, however large."""
        shape = f"{len(self._tokens)} {self.tokens_per_sample} {self._seed}"
        few = self.read(np.linspace(0, self.num_samples - 1, 64).astype(np.int64))["tokens"]
        return hashlib.sha256(shape.encode() + few.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def cut_windows(tokens: Tokens, starts: npt.NDArray[np.int64], sequence_length: int) -> Batch:
    """{"tokens": [len(starts), sequence_length + 1] int64}."""
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)]
    return {"tokens": torch.from_numpy(windows.astype(np.int64))}
