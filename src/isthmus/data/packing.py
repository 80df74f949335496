"""Text on disk as one long array of tokens: tokenised once, packed end to end, mapped and not read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.data.bad import ErrorBudget
from isthmus.data.cached import map_once
from isthmus.data.shuffle import permute
from isthmus.data.tokenizer import Tokenizer

RowNumbers = npt.NDArray[np.int64]  # [num_rows], sorted
_FORMAT = 1  # of what is cached


class ArrowTokens:
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
        """Tokens in all."""
        return int(self._starts[-1])

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.integer[Any]]:
        """The tokens at these places, in the places' shape."""
        chunks = np.searchsorted(self._starts, places, side="right") - 1
        tokens = np.empty(places.shape, self.dtype)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            tokens[here] = self._chunks[chunk][places[here] - self._starts[chunk]]
        return tokens


def hold_out(num_rows: int, fraction: float) -> RowNumbers:
    """The rows of the validation data: at least one, chosen by their number, alike on all machines."""
    num_held_out = min(max(1, round(num_rows * fraction)), num_rows - 1)
    return np.sort(permute(np.arange(num_held_out), num_rows, "validation"))


def pack(
    dataset: Any, column: str, tokenizer: Tokenizer, bad: ErrorBudget, without: RowNumbers | None = None
) -> ArrowTokens:
    """The tokens of all rows, in their order; made once, then found in the cache of `datasets`.

    Args:
        dataset: a `datasets.Dataset`, not empty.
        column: of its text.
        tokenizer: tells the texts apart by a token at the end of each.
        bad: where rows without text go, which are passed over.
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
                bad.add(f"row {number}", TypeError(f"its {column} is {type(value).__name__}, not text"))
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
    return ArrowTokens(packed.data.column("tokens"), tokenizer.dtype)


def _is_in(numbers: RowNumbers, chosen: RowNumbers) -> npt.NDArray[np.bool_]:
    """Which of the numbers are among the chosen ones."""
    if len(chosen) == 0:
        return np.zeros(len(numbers), bool)
    places = np.minimum(np.searchsorted(chosen, numbers), len(chosen) - 1)
    result: npt.NDArray[np.bool_] = chosen[places] == numbers
    return result
