"""Text of the `datasets` library: files here, or a name on the Hub; on disk or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.hub import Source, check_column, find_sources, load
from isthmus.data.options import check_options
from isthmus.data.packing import hold_out, pack
from isthmus.data.shards import Shards
from isthmus.data.streamed import open_splits
from isthmus.data.streamed_text import StreamedText
from isthmus.data.tokenizer import load_tokenizer
from isthmus.data.tokens import TokenDataSet


@dataclass(frozen=True)
class HuggingFace:
    """Text, tokenised and packed end to end without padding.

    On disk it is tokenised once, kept in the cache of `datasets`, and mapped from there. The validation data are
    `validation_split`, or else rows chosen by their number, alike on all machines.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers, and tokenises as it goes. Without `validation_split` every so many rows of each shard are
    held out.
    """

    name: str  # a folder, a file or pattern of files ("data/*.jsonl"), their address, or a name on the Hub
    config: str | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.05  # of the rows, where there is no validation_split
    text_column: str = "text"
    tokenizer: str = "bytes"  # or a folder, or a name on the Hub
    streaming: bool = False
    max_bad_samples: int = 10  # rows without text, unreadable files: passed over; one more ends the run

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, sequence_length: int) -> TokenDataSet | StreamedText:
        """Find the text, to be cut into samples of `sequence_length` tokens."""
        tokenizer, bad = load_tokenizer(self.tokenizer), ErrorBudget(self.max_bad_samples)
        place, held_out_place = find_sources(self, self.streaming)
        opened = self._open_streamed if self.streaming else self._open_on_disk
        return opened(place, held_out_place, tokenizer, bad, sequence_length)

    def _open_on_disk(
        self, place: Source, held_out_place: Source | None, tokenizer: Any, bad: ErrorBudget, sequence_length: int
    ) -> TokenDataSet:
        dataset = self._load_rows(place, bad)
        if held_out_place is not None:
            rows, without = self._load_rows(held_out_place, bad), None
        elif len(dataset) > 1:
            without = hold_out(len(dataset), self.validation_fraction)
            rows = dataset.select(without)
        else:
            raise UserError(f"data: split {place.split!r} of {self.name!r} has one row: set data.validation_split")
        train = pack(dataset, self.text_column, tokenizer, bad, without)
        return TokenDataSet(
            train, pack(rows, self.text_column, tokenizer, bad), sequence_length, vocab_size=tokenizer.vocab_size
        )

    def _open_streamed(
        self, place: Source, held_out_place: Source | None, tokenizer: Any, bad: ErrorBudget, sequence_length: int
    ) -> StreamedText:
        sides = open_splits(
            place, held_out_place, self.validation_fraction, lambda place: self._load_shards(place, bad)
        )
        return StreamedText(sides, tokenizer, sequence_length)

    def _load_rows(self, place: Source, bad: ErrorBudget) -> Any:
        dataset = load(place, bad)
        self._check(place, dataset.column_names, len(dataset) == 0)
        kind = getattr(dataset.features[self.text_column], "dtype", "a nested column")
        if kind not in ("string", "large_string", "null"):
            raise UserError(
                f"data: column {self.text_column!r} of {self.name!r} holds {kind}, not text: set text_column"
            )
        return dataset

    def _load_shards(self, place: Source, bad: ErrorBudget) -> Shards:
        dataset = load(place, bad)
        shards = Shards(dataset, self._text, self.name, bad)
        columns = dataset.column_names or shards.columns()
        self._check(place, columns, not columns)
        # what is known to be there can be picked before it is decoded; rows of JSON may lack it
        return (
            shards
            if dataset.features is None
            else Shards(dataset.select_columns([self.text_column]), self._text, self.name, bad)
        )

    def _text(self, columns: dict[str, Any], place: str) -> str:
        """What a row holds; see `shards.Shards`."""
        text = columns.get(self.text_column)
        if not isinstance(text, str):
            raise TypeError(f"its {self.text_column} is {type(text).__name__}, not text")
        return text

    def _check(self, place: Source, columns: list[str], is_empty: bool) -> None:
        if is_empty:
            raise UserError(f"data: split {place.split!r} of {self.name!r} has no rows; choose another data.split")
        check_column(self.name, "text_column", self.text_column, columns)
