"""Speech: folders of recordings, tables, data sets by name, digits made on the spot; with or without what was said."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.sample_order import Decoder, NumberedDataSet, NumberedSamples
from isthmus.data.shards import Shards
from isthmus.data.source import FileOptions, Source, list_files, require
from isthmus.data.speech_samples import (
    VOCABULARY,
    SpeechFile,
    SpeechShape,
    as_transcript,
    find_speech,
    read_header,
    that_fit,
)
from isthmus.data.spoken_digits import SPEAKERS, SpokenDigits, check_maker, choose_maker
from isthmus.data.streamed_rows import BLOCK_ROWS, StreamedRows
from isthmus.data.streaming import open_shards
from isthmus.data.tables import file_in, file_in_row, load_files, load_splits, map_once, row_name, streamed_file_in
from isthmus.data.validation import split_by_name, split_files

Found = tuple[list[SpeechFile], Callable[[str], Path | BytesIO]]  # recordings, and what finds a file by its location

_NUM_THREADS = 8  # that decode
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speech(FileOptions):
    """Recordings, all cut or padded to the model's `num_samples`, with zero mean and unit variance.

    A folder holds FLAC and WAV files at any depth, texts beside them. Tables (Parquet, Arrow, tar files) and data sets
    of the Hub hold a recording in every row. Every header is looked into once; of tables the cache of `datasets`
    remembers them. `validation` says what is held out.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers. Texts are padded to the longest of their batch.
    """

    built_in: ClassVar = ("made", "espeak", "formants")
    suffixes: ClassVar = (".flac", ".wav")

    # or any (see `SourceOptions`); "made": digits spoken by espeak-ng where that is installed, else by formants;
    # "espeak", "formants": the same everywhere
    source: str = "made"
    transcripts: bool = True  # read what was said, and leave out recordings that are longer than a sample; without, of
    # a longer one a random part is heard every time
    audio_column: str = "audio"  # of tables
    text_column: str = "text"  # of tables

    @property
    def known_sizes(self) -> dict[str, int]:
        """The least that a model must have."""
        return {"vocab_size": len(VOCABULARY)} if self.transcripts else {}

    @override
    def check_source(self) -> None:
        if self.source in self.built_in:
            check_maker(self.source)
        else:
            require("soundfile", "speech", "recordings are read by soundfile")
        super().check_source()

    @override
    def check_folder(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"data: {self.source!r} is no folder; give one with recordings, or made")
        if not any(path.suffix.lower() in self.suffixes for path in list_files(root)):
            raise UserError(f"data: there are no FLAC or WAV files in {str(root)!r}; give a folder of recordings")

    def open(self, sample_rate: int, num_samples: int) -> NumberedDataSet | StreamedRows:
        """Find the recordings and, where they are not streamed, look into each one's header."""
        self.check_source()
        shape, budget = SpeechShape(sample_rate, num_samples, self.transcripts), ErrorBudget(self.max_bad_samples)
        if self.source in self.built_in:
            return self._open_digits(shape, budget)
        threads = ThreadPoolExecutor(_NUM_THREADS, "speech").map
        decoder = Decoder(shape.read, shape.batch, shape.tokens_per_sample, budget, threads)
        if self.has_rows and self.streaming:
            return self._open_streamed(shape, decoder)
        if self.has_rows:
            splits = self._rows(shape, budget)
        else:
            root = Path(self.source).expanduser()
            with named_files():
                files = that_fit(find_speech(root, self.suffixes, shape, budget), shape)
            fraction = self.validation_fraction
            parts = split_files(root, files, lambda file: file.name, lambda file: file.speaker, fraction)
            splits = [(part, Path) for part in parts]
        longest = (
            max((len(file.text) for files, _ in splits for file in files), default=0) if self.transcripts else None
        )
        decoder = replace(decoder, batch=partial(shape.batch, longest_text=longest))
        train, validation = (_numbered(*split, decoder, f"{num_samples} {longest}") for split in splits)
        return NumberedDataSet(train, validation, self.known_sizes)

    def _open_digits(self, shape: SpeechShape, budget: ErrorBudget) -> NumberedDataSet:
        maker = choose_maker(self.source)
        splits = [
            SpokenDigits(maker, speakers, shape.sample_rate, shape.num_samples)
            for speakers in split_by_name(SPEAKERS, str, self.validation_fraction)
        ]
        longest = max(split.longest_text() for split in splits) if self.transcripts else None
        batch = partial(shape.batch, longest_text=longest)

        def numbered(split: SpokenDigits) -> NumberedSamples:
            decoder = Decoder(split.say, batch, shape.tokens_per_sample, budget)
            names = [f"spoken digits {number}" for number in range(len(split))]
            return NumberedSamples(names, lambda number: number, decoder, f"{split.fingerprint} {longest}")

        train, validation = map(numbered, splits)
        return NumberedDataSet(train, validation, self.known_sizes)

    def _rows(self, shape: SpeechShape, budget: ErrorBudget) -> list[Found]:
        """Recordings in the rows of tables."""
        splits = list[Found]()
        load = partial(load_files, columns=self._columns, kind="Audio", budget=budget)
        for dataset, rows in load_splits(self, load):
            sounds = dataset.select_columns([self.audio_column])
            files = self._look_into(dataset, sounds, rows, shape, budget)
            splits.append((that_fit(files, shape), file_in_row(sounds, self.audio_column)))
        return splits

    def _look_into(
        self, dataset: Any, sounds: Any, rows: Positions, shape: SpeechShape, budget: ErrorBudget
    ) -> list[SpeechFile]:
        from datasets import Value

        features = {"num_samples": Value("int64"), "rate": Value("int64"), "problem": Value("string")}
        headers = map_once(sounds, _header_in, [self.audio_column], [], features, "looking into recordings")[:]
        texts = dataset.select_columns([self.text_column])[:][self.text_column] if shape.transcripts else None
        files = []
        for row in rows.tolist():
            name, problem = row_name(dataset, row), headers["problem"][row]
            text = "" if texts is None else as_transcript(texts[row])
            if problem or (texts is not None and not text):
                budget.add(name, OSError(problem or "it has no transcript"))
                continue
            shape.check_rate(name, headers["rate"][row])
            files.append(SpeechFile(name, name, name, headers["num_samples"][row], text))
        return files

    def _open_streamed(self, shape: SpeechShape, decoder: Decoder) -> StreamedRows:
        longer = set[str]()  # names of rows

        def read(columns: dict[str, Any], name: str) -> tuple[bytes, int, str] | None:
            file = streamed_file_in(columns[self.audio_column], name)
            num_samples, rate = read_header(file)
            shape.check_rate(name, rate)
            if not shape.fits(num_samples):
                _count_longer(longer, name, shape)
                return None
            text = as_transcript(columns[self.text_column]) if shape.transcripts else ""
            if shape.transcripts and not text:
                raise TypeError("it has no transcript")
            return file.getvalue(), num_samples, text

        def load_shards(source: Source) -> Shards:
            rows = load_files(source, self._columns, "Audio", decoder.budget)
            return Shards(rows, read, source.name, decoder.budget)

        form = (self.audio_column, self._columns.get("text_column"), shape.num_samples, BLOCK_ROWS)
        return StreamedRows(*open_shards(self, load_shards), self.known_sizes, shape.tokens_per_sample, form, decoder)

    @property
    def _columns(self) -> dict[str, str]:
        """The columns that are read, by the options that name them."""
        return {"audio_column": self.audio_column} | ({"text_column": self.text_column} if self.transcripts else {})


def _numbered(
    files: list[SpeechFile], open_file: Callable[[str], Path | BytesIO], decoder: Decoder, form: str
) -> NumberedSamples:
    names = "".join(f"{file.name} {file.num_samples} {file.text}\n" for file in files)
    return NumberedSamples(
        [file.location for file in files],
        lambda number: (open_file(files[number].location), files[number].num_samples, files[number].text),
        decoder,
        f"{hashlib.sha256(names.encode()).hexdigest()} {form}",
    )


def _header_in(cell: dict[str, Any] | None) -> dict[str, Any]:
    """The header of a cell's file: {"num_samples", "rate", "problem"}."""
    try:
        num_samples, rate = read_header(file_in(cell))
    except OSError as error:
        return {"num_samples": 0, "rate": 0, "problem": error.strerror or str(error)}
    return {"num_samples": num_samples, "rate": rate, "problem": ""}


def _count_longer(longer: set[str], name: str, shape: SpeechShape) -> None:
    if name in longer:
        return
    longer.add(name)
    if len(longer).bit_count() == 1:  # the first, second, fourth, ... are said
        _log.warning(
            "data: %r is longer than %d samples and passed over, as its transcript would not fit: %d so far",
            name,
            shape.num_samples,
            len(longer),
        )
