"""Speech: folders of recordings, tables, data sets by name, digits made on the spot; with or without what was said."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.sample_order import NumberedDataSet, NumberedSamples
from isthmus.data.shards import Shards
from isthmus.data.source import FileOptions, find_sources, list_files, require
from isthmus.data.speech_files import SpeechFile, find_speech, that_fit
from isthmus.data.speech_samples import VOCABULARY, SpeechShape, Utterance, as_transcript, read_header
from isthmus.data.spoken_digits import SPEAKERS, SpokenDigits, check_maker, choose_maker
from isthmus.data.streamed_rows import BLOCK_ROWS, StreamedRows
from isthmus.data.streaming import open_splits
from isthmus.data.tables import bytes_in, file_in, load_files, load_splits, map_once
from isthmus.data.validation import split_by_name, split_files

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
    def check_libraries(self) -> None:
        if self.source in self.built_in:
            check_maker(self.source)
        else:
            require("soundfile", "speech", "recordings are read by soundfile")

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
        if self.has_rows and self.streaming:
            return self._open_streamed(shape, budget)
        if self.source in self.built_in:
            return self._open_digits(shape, budget)
        if self.has_rows:
            return self._open_rows(shape, budget)
        root = Path(self.source).expanduser()
        with named_files():
            files = that_fit(find_speech(root, self.suffixes, shape, budget), shape)
        splits = split_files(root, files, lambda file: file.name, lambda file: file.speaker, self.validation_fraction)
        return self._numbered([(split, Path) for split in splits], shape, budget)

    def _open_digits(self, shape: SpeechShape, budget: ErrorBudget) -> NumberedDataSet:
        maker = choose_maker(self.source)
        splits = [
            SpokenDigits(maker, speakers, shape.sample_rate, shape.num_samples)
            for speakers in split_by_name(SPEAKERS, str, self.validation_fraction)
        ]
        longest = max(each.longest_text() for each in splits) if shape.transcripts else None
        train, validation = (
            NumberedSamples(
                [f"spoken digits {number}" for number in range(len(each))],
                f"{each.fingerprint} {longest}",
                shape.tokens_per_sample,
                each.say,
                partial(shape.batch, longest_text=longest),
                budget,
                map,
            )
            for each in splits
        )
        return NumberedDataSet(train, validation, self.known_sizes)

    def _open_rows(self, shape: SpeechShape, budget: ErrorBudget) -> NumberedDataSet:
        splits = []
        load = partial(load_files, columns=self._columns, kind="Audio", budget=budget)
        for dataset, rows in load_splits(*find_sources(self), self.validation_fraction, load):
            sounds = dataset.select_columns([self.audio_column])
            files = self._look_into(dataset, sounds, rows, shape, budget)
            splits.append((that_fit(files, shape), self._row_loader(sounds)))
        return self._numbered(splits, shape, budget)

    def _look_into(
        self, dataset: Any, sounds: Any, rows: Positions, shape: SpeechShape, budget: ErrorBudget
    ) -> list[SpeechFile]:
        from datasets import Value

        features = {"num_samples": Value("int64"), "rate": Value("int64"), "problem": Value("string")}
        headers = map_once(sounds, _header_in, [self.audio_column], [], features, "looking into recordings")[:]
        texts = dataset.select_columns([self.text_column])[:][self.text_column] if shape.transcripts else None
        files = []
        for row in rows.tolist():
            name, problem = f"row {row} of {dataset.split}", headers["problem"][row]
            text = "" if texts is None else as_transcript(texts[row])
            if problem or (texts is not None and not text):
                budget.add(name, OSError(problem or "it has no transcript"))
                continue
            shape.check_rate(name, headers["rate"][row])
            files.append(SpeechFile(name, name, name, headers["num_samples"][row], text))
        return files

    def _row_loader(self, sounds: Any) -> Callable[[str], Path | BinaryIO]:
        return lambda name: file_in(sounds[int(name.split()[1])][self.audio_column])

    def _open_streamed(self, shape: SpeechShape, budget: ErrorBudget) -> StreamedRows:
        longer = set[str]()  # names of rows

        def read(columns: dict[str, Any], name: str) -> tuple[bytes, int, str] | None:
            content = bytes_in(columns[self.audio_column], name)
            num_samples, rate = read_header(BytesIO(content))
            shape.check_rate(name, rate)
            if not shape.fits(num_samples):
                _count_longer(longer, name, shape)
                return None
            text = as_transcript(columns[self.text_column]) if shape.transcripts else ""
            if shape.transcripts and not text:
                raise TypeError("it has no transcript")
            return content, num_samples, text

        def decode(row: tuple[bytes, int, str], seed: int | None) -> Utterance:
            content, num_samples, text = row
            return shape.read(BytesIO(content), num_samples, seed), text

        splits = open_splits(
            *find_sources(self),
            self.validation_fraction,
            lambda each: Shards(load_files(each, self._columns, "Audio", budget), read, each.name, budget),
        )
        form = (self.audio_column, self._columns.get("text_column"), shape.num_samples, BLOCK_ROWS)
        each = ThreadPoolExecutor(_NUM_THREADS, "speech").map
        return StreamedRows(splits, self.known_sizes, shape.tokens_per_sample, form, decode, shape.batch, budget, each)

    def _numbered(
        self,
        splits: list[tuple[list[SpeechFile], Callable[[str], Path | BinaryIO]]],
        shape: SpeechShape,
        budget: ErrorBudget,
    ) -> NumberedDataSet:
        """Recordings to train on and to evaluate with, each split with what opens a recording's location."""
        longest = (
            max((len(file.text) for files, _ in splits for file in files), default=0) if shape.transcripts else None
        )
        each = ThreadPoolExecutor(_NUM_THREADS, "speech").map

        def samples(files: list[SpeechFile], load: Callable[[str], Path | BinaryIO]) -> NumberedSamples:
            def read(number: int, seed: int | None) -> Utterance:
                file = files[number]
                return shape.read(load(file.location), file.num_samples, seed), file.text

            names = "".join(f"{file.name} {file.num_samples} {file.text}\n" for file in files)
            fingerprint = f"{hashlib.sha256(names.encode()).hexdigest()} {shape.num_samples} {longest}"
            batch = partial(shape.batch, longest_text=longest)
            locations = [file.location for file in files]
            return NumberedSamples(locations, fingerprint, shape.tokens_per_sample, read, batch, budget, each)

        train, validation = (samples(*split) for split in splits)
        return NumberedDataSet(train, validation, self.known_sizes)

    @property
    def _columns(self) -> dict[str, str]:
        """The columns that are read, by the options that name them."""
        return {"audio_column": self.audio_column} | ({"text_column": self.text_column} if self.transcripts else {})


def _header_in(cell: dict[str, Any] | None) -> dict[str, Any]:
    """What the header of a cell's file says: {"num_samples", "rate", "problem"}."""
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
