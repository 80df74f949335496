"""Text as one long array of tokens, in memory or mapped from the disk, and the windows that are its samples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget
from isthmus.data.shuffle import derive, permute_epochs
from isthmus.data.tables import map_once
from isthmus.data.tokenizer import Tokenizer
from isthmus.inner.step import Batch

_FORMAT = 1  # of what is cached


class MappedTokens:
    """The lists of a mapped Arrow column, end to end. Only what is asked for is read from the disk.

    Args:
        column: a `pyarrow.ChunkedArray` of lists of integers, without nulls.
        dtype: of the integers.
    """

    def __init__(self, column: Any, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, indices: Positions) -> npt.NDArray[np.integer[Any]]:
        """Return the tokens at these indices, in the indices' shape."""
        chunks = np.searchsorted(self._starts, indices, side="right") - 1
        tokens = np.empty(indices.shape, self.dtype)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            tokens[here] = self._chunks[chunk][indices[here] - self._starts[chunk]]
        return tokens


Tokens = npt.NDArray[np.integer[Any]] | MappedTokens  # end to end


class TokenDataSet:
    """Training and validation tokens, cut into windows of `sequence_length` + 1; neighbours share one token."""

    def __init__(self, train: Tokens, validation: Tokens, sequence_length: int, vocab_size: int) -> None:
        check_num_tokens(len(train), sequence_length, "training")
        check_num_tokens(len(validation), sequence_length, "validation")
        self.train, self.held_out = train, validation
        self.sequence_length, self.sizes = sequence_length, {"vocab_size": vocab_size}

    def sample_order(self, seed: int = 0) -> WindowOrder:
        """Return all training windows, in the order that `seed` chooses."""
        return WindowOrder(self.train, self.sequence_length, seed)

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Return windows spread evenly over the validation tokens; all where they are fewer than asked for."""
        length, num_windows = self.sequence_length, (len(self.held_out) - 1) // self.sequence_length
        starts = np.linspace(0, num_windows - 1, min(num_samples, num_windows)).astype(np.int64) * length
        return [
            cut_windows(self.held_out, starts[i : i + batch_size], length) for i in range(0, len(starts), batch_size)
        ]


class WindowOrder:
    """The windows of the training tokens in one endless order.

    An epoch is a permutation of as many windows as fit wherever the first one starts, which, like the permutation, is
    drawn from (seed, epoch).
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int) -> None:
        self.tokens_per_sample = sequence_length
        self._tokens, self._seed = tokens, seed
        self.num_samples = max(1, len(tokens) // sequence_length - 1)  # of an epoch
        self._num_offsets = min(sequence_length, len(tokens) - self.num_samples * sequence_length)
        # of the shape and of 64 samples of the first epoch: little is read, however large the data are
        shape = f"{len(tokens)} {sequence_length} {seed}"
        few = self.read(np.linspace(0, self.num_samples - 1, 64).astype(np.int64))["tokens"]
        self.fingerprint = hashlib.sha256(shape.encode() + few.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    def read(self, positions: Positions) -> Batch:
        """Return the windows as {"tokens": [len(positions), sequence_length + 1] int64}."""
        epochs, windows = permute_epochs(positions, self.num_samples, self._seed)
        offsets = [derive(self._num_offsets, f"{self._seed}/{epoch}/offset") for epoch in epochs]
        return cut_windows(self._tokens, np.array(offsets) + windows * self.tokens_per_sample, self.tokens_per_sample)


def cut_windows(tokens: Tokens, starts: Positions, sequence_length: int) -> Batch:
    """Return the windows that start there as {"tokens": [len(starts), sequence_length + 1] int64}."""
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)]
    return {"tokens": torch.from_numpy(windows.astype(np.int64))}


def check_num_tokens(num_tokens: int, sequence_length: int, name: str) -> None:
    """Refuse data, named so, that are too short for one window."""
    if num_tokens <= sequence_length:
        raise UserError(
            f"data: a sequence of {sequence_length} tokens needs {sequence_length + 1}, the {name} data has "
            f"{num_tokens}; choose a shorter sequence_length or give more data"
        )


def tokenise_rows(
    dataset: Any, rows: Positions, column: str, tokenizer: Tokenizer, budget: ErrorBudget
) -> MappedTokens:
    """Return the tokens of some rows, in their order; made once, then found in the cache of `datasets`.

    Args:
        dataset: a `datasets.Dataset`, not empty.
        rows: the numbers of the rows, sorted.
        column: of its text.
        tokenizer: tells the texts apart by a token at the end of each.
        budget: where rows without text go, which are passed over.
    """
    from datasets import Value

    chosen = np.zeros(len(dataset), bool)
    chosen[rows] = True
    left_out = hashlib.sha256(np.flatnonzero(~chosen).tobytes()).hexdigest()

    def tokenise(values: list[Any], numbers: list[int]) -> dict[str, list[Any]]:
        texts = []
        for value, number in zip(values, numbers, strict=True):
            if isinstance(value, str) and chosen[number]:
                texts.append(value)
            elif chosen[number]:
                budget.add(f"row {number}", TypeError(f"its {column} is {type(value).__name__}, not text"))
        return {"tokens": tokenizer.encode(texts)}

    tokens = map_once(
        dataset,
        tokenise,
        [column],
        [_FORMAT, tokenizer.fingerprint, left_out],
        {"tokens": [Value(tokenizer.dtype.name)]},
        "tokenising",
        with_indices=True,
        batched=True,
    )
    return MappedTokens(tokens.data.column("tokens"), tokenizer.dtype)
