"""Text: the standard library's source, files, tables with a column of text, data sets by name; on disk or streamed."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.errors import TO_UTF_8, ErrorBudget, named_files
from isthmus.data.shards import Shards
from isthmus.data.source import (
    Source,
    SourceOptions,
    check_tables,
    check_utf_8,
    is_table,
    list_files,
    names_files,
    require,
)
from isthmus.data.streamed_text import StreamedText
from isthmus.data.streaming import open_shards
from isthmus.data.tables import check_column, load_rows, load_splits
from isthmus.data.tokenizer import Bytes, OneText, Tokenizer, load_tokenizer
from isthmus.data.tokens import TokenDataSet, tokenise_rows
from isthmus.data.validation import split_files

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Text(SourceOptions):
    """Text, as bytes or by a tokenizer of transformers, packed end to end without padding.

    Files of plain text are read whole, hidden ones excepted, in the order of their paths; a single file is mapped
    where its bytes are the tokens. Tables (JSON lines, Parquet, Arrow, CSV, tar files) and data sets of the Hub hold a
    text in every row; they are tokenised once, kept in the cache of `datasets`, and mapped from there. A folder is one
    of tables where most of its files are.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers, and tokenises as it goes; of plain text a line is a row.

    `validation` says what is held out.
    """

    source: str = "stdlib"  # or any (see `SourceOptions`); "stdlib": the interpreter's own library, without tests
    validation_fraction: float = 0.05
    tokenizer: str = "bytes"  # or a folder, or a name on the Hub
    text_column: str | None = None  # of tables; None: "text". Where it is set plain text is a table, too: a row a line

    @property
    def known_sizes(self) -> dict[str, int]:
        """The least that a model must have, as far as it is known before reading."""
        return {"vocab_size": 256} if self.tokenizer == "bytes" else {}

    def check_source(self) -> None:
        """Refuse text that is not there, is empty, or not in UTF-8, without reading it."""
        with named_files():
            files = self._plain_files
            if files is None:
                check_tables(self)
                return
            if not files:
                raise UserError(f"data: {self.source!r} holds no text; give a file or folder that is not empty")
            check_utf_8(files, whole=self.tokenizer != "bytes" or self.streaming)
            if self.streaming:
                require("datasets", "datasets", "text is streamed by datasets")

    def open(self, sequence_length: int) -> TokenDataSet | StreamedText:
        """Find the text, to be cut into samples of `sequence_length` tokens."""
        self.check_source()
        tokenizer, budget, files = load_tokenizer(self.tokenizer), ErrorBudget(self.max_bad_samples), self._plain_files
        if files is not None and not self.streaming:
            return TokenDataSet(*self._split(files, tokenizer), sequence_length, tokenizer.vocab_size)
        if self.streaming:
            shards = open_shards(self, lambda source: self._load_shards(source, budget))
            sizes, form = {"vocab_size": tokenizer.vocab_size}, (tokenizer.fingerprint, sequence_length)
            return StreamedText(*shards, sizes, sequence_length, form, tokenizer)
        (dataset, rows), (held_out, held_out_rows) = load_splits(self, lambda source: self._load_rows(source, budget))
        train = tokenise_rows(dataset, rows, self._column, tokenizer, budget)
        held_out = held_out.select(held_out_rows)
        validation = tokenise_rows(held_out, np.arange(len(held_out)), self._column, tokenizer, budget)
        return TokenDataSet(train, validation, sequence_length, tokenizer.vocab_size)

    @property
    @override
    def plain_texts(self) -> tuple[str, ...]:
        return tuple(map(str, self._plain_files or ()))

    @property
    def _root(self) -> Path:
        return Path(sysconfig.get_path("stdlib") if self.source == "stdlib" else self.source).expanduser()

    @cached_property
    def _plain_files(self) -> list[Path] | None:
        """The files whose content is the text, sorted, without empty ones; None where rows hold it."""
        root = self._root
        if self.source == "stdlib":
            found = [path for path in list_files(root, _NOT_STDLIB) if path.suffix == ".py"]
        elif self.text_column is not None or "*" in self.source or not names_files(self.source):
            return None
        elif root.is_dir():
            found = list(list_files(root))
            if 2 * sum(is_table(path.name) for path in found) > len(found):
                return None
        elif is_table(self.source) or "://" in self.source:
            return None
        elif not root.exists():
            if root.is_symlink():
                root.stat()  # says what is wrong with it
            raise UserError(f"data: {self.source!r} does not exist; give a file, a folder or stdlib")
        else:
            found = [root]
        return sorted(path for path in found if path.is_file() and path.stat().st_size > 0)

    def _split(self, files: list[Path], tokenizer: Tokenizer) -> tuple[OneText, OneText]:
        if len(files) == 1:
            is_bytes = isinstance(tokenizer, Bytes)
            tokens = np.memmap(files[0], dtype=np.uint8, mode="r") if is_bytes else _read(files, tokenizer)
            end = round(len(tokens) * (1 - self.validation_fraction))
            return tokens[:end], tokens[end:]

        def name(path: Path) -> str:
            return path.relative_to(self._root).as_posix()

        train, validation = split_files(self._root, files, name, name, self.validation_fraction)
        return _read(train, tokenizer), _read(validation, tokenizer)

    @property
    def _column(self) -> str:
        return self.text_column or "text"

    def _load_rows(self, source: Source, budget: ErrorBudget) -> Any:
        dataset = load_rows(source, budget)
        self._check_columns(source, dataset.column_names, len(dataset) == 0)
        kind = getattr(dataset.features[self._column], "dtype", "a nested column")
        if kind not in ("string", "large_string", "null"):
            raise UserError(f"data: column {self._column!r} of {source.name!r} holds {kind}, not text: set text_column")
        return dataset

    def _load_shards(self, source: Source, budget: ErrorBudget) -> Shards:
        dataset = load_rows(source, budget)
        columns = dataset.column_names or Shards(dataset, self._text_in, source.name, budget).columns()
        self._check_columns(source, columns, not columns)
        if dataset.features is not None:  # else rows of JSON may lack the column
            dataset = dataset.select_columns([self._column])
        return Shards(dataset, self._text_in, source.name, budget)

    def _text_in(self, columns: dict[str, Any], name: str) -> str:
        """The text that a row holds; see `shards.Shards`."""
        text = columns.get(self._column)
        if not isinstance(text, str):
            raise TypeError(f"its {self._column} is {type(text).__name__}, not text")
        return text

    def _check_columns(self, source: Source, columns: list[str], is_empty: bool) -> None:
        if is_empty:
            raise UserError(f"data: split {source.split!r} of {source.name!r} has no rows; choose another data.split")
        check_column(source.name, "text_column", self._column, columns)


def _read(files: Iterable[Path], tokenizer: Tokenizer) -> OneText:
    """The tokens of all files, the end of each marked."""
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(b"".join(path.read_bytes() + _END_OF_FILE for path in files), dtype=np.uint8)
    texts = []
    for path in files:
        try:
            texts.append(path.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"data: {str(path)!r} is not UTF-8: {TO_UTF_8}") from error
    return np.concatenate([np.empty(0, tokenizer.dtype), *tokenizer.encode(texts)])
