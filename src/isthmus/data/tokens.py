"""Text as one long array of tokens, in memory or mapped from the disk, and the windows that are its samples."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget
from isthmus.data.shuffle import derive, permute
from isthmus.data.tables import map_once
from isthmus.data.tokenizer import Tokenizer
from isthmus.data.validation import RowNumbers
from isthmus.inner.step import Batch

_FORMAT = 1  # of what is cached


class Tokens(Protocol):
    """Tokens end to end: an array, or `MappedTokens`."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: Any, /) -> Any: ...


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
        """Return all training windows, in the order that `seed` chooses."""
        return WindowOrder(self.train, self.sequence_length, seed)

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """Return windows spread evenly over the validation tokens; all where they are fewer than asked for."""
        num_windows = (len(self.held_out) - 1) // self.sequence_length
        chosen = np.linspace(0, num_windows - 1, min(num_samples, num_windows)).astype(np.int64)
        return [
            cut_windows(self.held_out, chosen[start : start + batch_size] * self.sequence_length, self.sequence_length)
            for start in range(0, len(chosen), batch_size)
        ]


class WindowOrder:
    """The windows of the training tokens in one endless order.

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

    def read(self, positions: Positions) -> Batch:
        """Return the windows as {"tokens": [len(positions), sequence_length + 1] int64}."""
        epochs, indices = np.divmod(positions, self.num_samples)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here, key = epochs == epoch, f"{self._seed}/{epoch}"
            windows = permute(indices[here], self.num_samples, key)
            starts[here] = derive(self._num_offsets, f"{key}/offset") + windows * self.tokens_per_sample
        return cut_windows(self._tokens, starts, self.tokens_per_sample)

    def _hash(self) -> str:
        """A hash of the shape and of 64 samples of the first epoch: little is read, however large the data are."""
        shape = f"{len(self._tokens)} {self.tokens_per_sample} {self._seed}"
        few = self.read(np.linspace(0, self.num_samples - 1, 64).astype(np.int64))["tokens"]
        return hashlib.sha256(shape.encode() + few.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def cut_windows(tokens: Tokens, starts: Positions, sequence_length: int) -> Batch:
    """Return the windows that start there as {"tokens": [len(starts), sequence_length + 1] int64}."""
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)]
    return {"tokens": torch.from_numpy(windows.astype(np.int64))}


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

    def __getitem__(self, places: Positions) -> npt.NDArray[np.integer[Any]]:
        """Return the tokens at these places, in the places' shape."""
        chunks = np.searchsorted(self._starts, places, side="right") - 1
        tokens = np.empty(places.shape, self.dtype)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            tokens[here] = self._chunks[chunk][places[here] - self._starts[chunk]]
        return tokens


def pack(
    dataset: Any, column: str, tokenizer: Tokenizer, budget: ErrorBudget, without: RowNumbers | None = None
) -> MappedTokens:
    """Return the tokens of all rows, in their order; made once, then found in the cache of `datasets`.

    Args:
        dataset: a `datasets.Dataset`, not empty.
        column: of its text.
        tokenizer: tells the texts apart by a token at the end of each.
        budget: where rows without text go, which are passed over.
        without: rows that are left out.
    """
    from datasets import Value

    left_out = np.empty(0, np.int64) if without is None else without
    left_out_hash = hashlib.sha256(left_out.tobytes()).hexdigest()

    def tokenise(values: list[Any], numbers: list[int]) -> dict[str, list[Any]]:
        kept = ~_is_in(np.asarray(numbers, np.int64), left_out)
        texts = []
        for value, number, keep in zip(values, numbers, kept, strict=True):
            if keep and not isinstance(value, str):
                budget.add(f"row {number}", TypeError(f"its {column} is {type(value).__name__}, not text"))
            elif keep:
                texts.append(value)
        return {"tokens": tokenizer.encode(texts)}

    packed = map_once(
        dataset,
        tokenise,
        [column],
        [_FORMAT, tokenizer.fingerprint, left_out_hash],
        {"tokens": [Value(tokenizer.dtype.name)]},
        "tokenising",
        with_indices=True,
        batched=True,
    )
    return MappedTokens(packed.data.column("tokens"), tokenizer.dtype)


def _is_in(numbers: RowNumbers, chosen: RowNumbers) -> npt.NDArray[np.bool_]:
    """Which of the numbers are among the chosen ones."""
    if len(chosen) == 0:
        return np.zeros(len(numbers), bool)
    places = np.minimum(np.searchsorted(chosen, numbers), len(chosen) - 1)
    result: npt.NDArray[np.bool_] = chosen[places] == numbers
    return result
