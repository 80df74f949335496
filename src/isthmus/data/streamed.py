"""Text that is read as it comes: each worker its own shards, tokenised, packed, shuffled in blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Never, Self

import numpy as np
import torch

from isthmus.core.types import UserError
from isthmus.data.deal import Piece, deal
from isthmus.data.prefetch import Prefetched
from isthmus.data.shards import Shards
from isthmus.data.shuffle import permute
from isthmus.data.tokenizer import OneText, Tokenizer
from isthmus.data.tokens import cut_windows
from isthmus.inner.step import Batch

_BLOCK_WINDOWS = 1024  # that are shuffled together
_TEXTS = 256  # that are tokenised together
_IDLE_EPOCHS = 10  # without a text, until a worker gives up


@dataclass(frozen=True)
class StreamedCorpus:
    """Streamed text, in windows of `sequence_length` + 1 tokens; neighbours share one token.

    Attributes:
        train: shards to train on.
        held_out: shards to evaluate with.
        every: which rows of `train` are held out instead, where `held_out` is `train`: every so many; 0: none.
        tokenizer: of the text.
        sequence_length: tokens a sample trains on.
        name: of the data, for messages.
    """

    train: Shards
    held_out: Shards
    every: int
    tokenizer: Tokenizer
    sequence_length: int
    name: str

    @property
    def sizes(self) -> dict[str, int]:
        """What a model must have at least."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def samples(self, seed: int = 0) -> Never:
        """There is no line: a stream has no samples by number."""
        raise UserError(
            "data: workers that come and go share samples by number, which streamed data do not have: "
            "set data.streaming to false, or outer.transport.type to torch_dist"
        )

    def stream(self, seed: int, batch_size: int, worker: int, num_workers: int) -> Prefetched:
        """Worker `worker`'s batches, read ahead."""
        return Prefetched(TextStream(self, seed, batch_size, worker, num_workers))

    def validation(self, batch_size: int, num_samples: int = 256) -> list[Batch]:
        """The first windows of the validation data."""
        length, parts, num_tokens = self.sequence_length, list[OneText](), 0
        for text in self._held_out_texts():
            parts += self.tokenizer.encode([text])
            num_tokens += len(parts[-1])
            if num_tokens > num_samples * length:
                break
        if num_tokens <= length:
            raise UserError(
                f"data: a sequence of {length} tokens needs {length + 1}, the validation data has {num_tokens}; "
                "choose a shorter sequence_length or give more data"
            )
        tokens = np.concatenate(parts)
        starts = np.arange(min(num_samples, (num_tokens - 1) // length)) * length
        return [cut_windows(tokens, starts[i : i + batch_size], length) for i in range(0, len(starts), batch_size)]

    def holds_out(self, row: int) -> bool:
        """Whether a row of `train` is one of the validation data."""
        return self.every > 0 and row % self.every == 0

    def fingerprint(self, seed: int) -> str:
        """Differs where a position stands for another sample, as far as can be said without reading the data."""
        parts = [self.name, self.train.num_shards, self.every, self.tokenizer.fingerprint, self.sequence_length, seed]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _held_out_texts(self) -> Iterator[str]:
        for number in range(self.held_out.num_shards):
            for row, text in self.held_out.open(number):
                if self.every == 0 or self.holds_out(row):
                    yield text


class TextStream:
    """One worker's batches. It reads its pieces of an epoch one after the other, then begins the next epoch.

    Tokens gather until there are enough for a block of windows, which are then shuffled; a block ends with the epoch.
    A position is what was made and not yet taken (windows, and tokens too few for one), and where reading goes on: so
    it is exact, and what was read is not read again.

    Args:
        corpus: the data.
        seed: of the order of shards and windows.
        batch_size: samples a batch.
        worker: number of this worker, from 0.
        num_workers: that share the data.
    """

    def __init__(self, corpus: StreamedCorpus, seed: int, batch_size: int, worker: int, num_workers: int) -> None:
        if batch_size < 1:
            raise UserError(f"data: batch_size is {batch_size}; choose at least 1")
        self.tokens_per_batch = batch_size * corpus.sequence_length
        self._corpus, self._seed, self._batch_size = corpus, seed, batch_size
        self._worker, self._num_workers = worker, num_workers
        self._epoch, self._num_blocks, self._idle_epochs = -1, 0, 0
        self._pieces: list[Piece] = []  # the first is being read
        self._texts: Any = None  # of the first piece
        self._windows = torch.empty(0, corpus.sequence_length + 1, dtype=torch.int32)
        self._rest = np.empty(0, corpus.tokenizer.dtype)

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch: {"tokens": [batch, sequence_length + 1] int64}."""
        while len(self._windows) < self._batch_size:
            self._windows = torch.cat([self._windows, self._next_block()])
        batch, self._windows = self._windows[: self._batch_size], self._windows[self._batch_size :]
        return {"tokens": batch.long()}

    def state_dict(self) -> dict[str, Any]:
        """The position, with tensors; it becomes wrong with no later batch."""
        if self._texts is not None:
            self._pieces[0] = {**self._pieces[0], "position": self._texts.state_dict()}
        return {
            "fingerprint": self._corpus.fingerprint(self._seed),
            "seed": self._seed,
            "num_shards": self._corpus.train.num_shards,
            "epoch": self._epoch,
            "blocks": self._num_blocks,
            "pieces": list(self._pieces),
            "windows": self._windows,
            "rest": torch.from_numpy(self._rest.astype(np.int32)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; refuses one in other data."""
        known = self._corpus.fingerprint(self._seed)
        if state_dict["fingerprint"] != known:
            raise UserError(
                f"data: the saved position is one in data {state_dict['fingerprint']}, these are {known}: "
                "restore the data, their seed and sample size, or start a new run"
            )
        self._epoch, self._num_blocks = state_dict["epoch"], state_dict["blocks"]
        self._pieces, self._texts = list(state_dict["pieces"]), None
        self._windows = state_dict["windows"]
        self._rest = state_dict["rest"].numpy().astype(self._corpus.tokenizer.dtype)

    def _next_block(self) -> torch.Tensor:
        """[windows, sequence_length + 1] int32, shuffled; fewer than a block at the end of an epoch, perhaps none."""
        length, parts, num_tokens = self._corpus.sequence_length, [self._rest], len(self._rest)
        if not self._pieces:
            self._begin_epoch()
        while num_tokens <= _BLOCK_WINDOWS * length and (texts := self._next_texts()):
            self._idle_epochs = 0
            parts += self._corpus.tokenizer.encode(texts)
            num_tokens += sum(len(tokens) for tokens in parts[-len(texts) :])
        tokens = np.concatenate(parts)
        num_windows = max(0, len(tokens) - 1) // length
        self._rest = tokens[num_windows * length :]
        if num_windows == 0:
            return self._windows[:0]
        order = permute(np.arange(num_windows), num_windows, f"{self._seed}/{self._num_blocks}/windows")
        self._num_blocks += 1
        return cut_windows(tokens, order * length, length)["tokens"].int()

    def _next_texts(self) -> list[str]:
        """A few texts of this worker's part of the epoch; none at its end."""
        texts: list[str] = []
        while self._pieces and len(texts) < _TEXTS:
            piece = self._pieces[0]
            if self._texts is None:
                self._texts = self._corpus.train.open(piece["shard"], piece["position"])
            row, text = next(self._texts, (-1, ""))
            if row < 0:
                del self._pieces[0]
                self._texts = None
            elif row % piece["parts"] == piece["part"] and not self._corpus.holds_out(row):
                texts.append(text)
        return texts

    def _begin_epoch(self) -> None:
        if self._idle_epochs == _IDLE_EPOCHS:
            raise UserError(
                f"data: worker {self._worker} found no text in {self._corpus.name!r}, {_IDLE_EPOCHS} epochs long: "
                "give more data than validation takes"
            )
        self._idle_epochs += 1
        self._epoch += 1
        self._pieces = deal(self._corpus.train.num_shards, self._seed, self._epoch, self._worker, self._num_workers)
