"""Text that is read as it comes: tokenised, packed, shuffled in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from isthmus.data.shuffle import permute
from isthmus.data.streaming import PrefetchedBatches, StreamedBatches, StreamedDataSet
from isthmus.data.tokenizer import OneText, Tokenizer
from isthmus.data.tokens import check_num_tokens, cut_windows
from isthmus.inner.step import Batch

_BLOCK_WINDOWS = 1024  # that are shuffled together
_TEXTS = 256  # that are tokenised together


@dataclass(frozen=True)
class StreamedText(StreamedDataSet):
    """Streamed text, in windows of `tokens_per_sample` + 1 tokens; neighbours share one token."""

    tokenizer: Tokenizer

    @override
    def batches(self, seed: int, batch_size: int, worker: int, num_workers: int) -> PrefetchedBatches:
        return PrefetchedBatches(TextBatches(self, seed, batch_size, worker, num_workers))

    @override
    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        length, parts, num_tokens = self.tokens_per_sample, list[OneText](), 0
        for row in self.held_out_rows():
            parts += self.tokenizer.encode([row.value])
            num_tokens += len(parts[-1])
            if num_tokens > num_samples * length:
                break
        check_num_tokens(num_tokens, length, "validation")
        tokens = np.concatenate(parts)
        starts = np.arange(min(num_samples, (num_tokens - 1) // length)) * length
        return [cut_windows(tokens, starts[i : i + batch_size], length) for i in range(0, len(starts), batch_size)]


class TextBatches(StreamedBatches[StreamedText]):
    """One worker's batches of windows.

    Tokens gather until there are enough for a block of windows, which are then shuffled; a block ends with the epoch.
    A position is what was made and not yet taken (windows, and tokens too few for one), and where reading goes on: so
    it is exact, and what was read is not read again.
    """

    unit = "text"

    def __init__(self, data_set: StreamedText, seed: int, batch_size: int, worker: int, num_workers: int) -> None:
        super().__init__(data_set, seed, batch_size, worker, num_workers)
        self._tokenizer, self._length = data_set.tokenizer, data_set.tokens_per_sample
        self._num_blocks = 0
        self._windows = torch.empty(0, self._length + 1, dtype=torch.int32)
        self._rest = np.empty(0, self._tokenizer.dtype)

    @override
    def read_batch(self) -> Batch:
        while len(self._windows) < self.batch_size:
            self._windows = torch.cat([self._windows, self._next_block()])
        batch, self._windows = self._windows[: self.batch_size], self._windows[self.batch_size :]
        return {"tokens": batch.long()}

    @override
    def state_dict(self) -> dict[str, Any]:
        self._move_position()
        return super().state_dict() | {
            "blocks": self._num_blocks,
            "windows": self._windows,
            "rest": torch.from_numpy(self._rest.astype(np.int32)),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._num_blocks, self._windows = state_dict["blocks"], state_dict["windows"]
        self._rest = state_dict["rest"].numpy().astype(self._tokenizer.dtype)

    def _next_block(self) -> torch.Tensor:
        """[windows, sequence_length + 1] int32, shuffled; fewer than a block at the end of an epoch, perhaps none."""
        length, parts, num_tokens = self._length, [self._rest], len(self._rest)
        if not self._pieces:
            self._begin_epoch()
        while num_tokens <= _BLOCK_WINDOWS * length and (texts := self._next_texts()):
            self._idle_epochs = 0
            parts += self._tokenizer.encode(texts)
            num_tokens += sum(len(tokens) for tokens in parts[-len(texts) :])
        tokens = np.concatenate(parts)
        num_windows = max(0, len(tokens) - 1) // length
        self._rest = tokens[num_windows * length :]
        if num_windows == 0:
            return self._windows[:0]
        order = permute(np.arange(num_windows), num_windows, f"{self.seed}/{self._num_blocks}/windows")
        self._num_blocks += 1
        return cut_windows(tokens, order * length, length)["tokens"].int()

    def _next_texts(self) -> list[str]:
        """A few texts of this worker's part of the epoch; none at its end."""
        texts: list[str] = []
        while self._pieces and len(texts) < _TEXTS:
            some = [row.value for row in islice(self._own_rows(), _TEXTS - len(texts))]
            if not some:
                self._end_piece()
            texts += some
        return texts
