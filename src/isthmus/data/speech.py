"""Speech: folders of recordings, tables, data sets by name, digits made on the spot; with or without what was said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core.types import UserError
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.sample_order import NumberedDataSet
from isthmus.data.shards import Shards
from isthmus.data.source import SourceOptions, cannot_stream, check_tables, find_sources, has_rows, list_files, require
from isthmus.data.speech_files import (
    SUFFIXES,
    SpeechFile,
    SpeechFiles,
    as_transcript,
    check_rate,
    find_speech,
    without_longer,
)
from isthmus.data.speech_samples import (
    VOCABULARY,
    NumberedSpeech,
    SpeechRows,
    header_in,
    sound_in,
    speech_data_set,
)
from isthmus.data.spoken_digits import SPEAKERS, SpokenDigits, check_maker, choose_maker
from isthmus.data.streamed_rows import StreamedRows
from isthmus.data.streaming import open_splits
from isthmus.data.tables import check_column, check_kind, load_files, load_splits, map_once
from isthmus.data.validation import RowNumbers, held_out_names, own_parts

_MADE = ("made", "espeak", "formants")
_NUM_THREADS = 8  # that decode


@dataclass(frozen=True)
class Speech(SourceOptions):
    """Recordings, all cut or padded to the model's `num_samples`, with zero mean and unit variance.

    A folder holds FLAC and WAV files at any depth, texts beside them. Tables (Parquet, Arrow, tar files) and data sets
    of the Hub hold a recording in every row. Every header is looked into once; of tables the cache of `datasets`
    remembers them. `validation` says what is held out.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers. Texts are padded to the longest of their batch.
    """

    source: str = (
        "made"  # or any (see `SourceOptions`); "made": digits spoken by espeak-ng where that is installed, else
    )
    # by formants; "espeak", "formants": the same everywhere
    transcripts: bool = True  # read what was said, and leave out recordings that are longer than a sample; without, of
    # a longer one a random part is heard every time
    audio_column: str = "audio"  # of tables
    text_column: str = "text"  # of tables

    @property
    def known_sizes(self) -> dict[str, int]:
        """What a model must have at least, as far as it is known before reading."""
        return {"vocab_size": len(VOCABULARY)} if self.transcripts else {}

    def check_source(self) -> None:
        """Refuse recordings that are not there, and libraries that are not installed, without reading a recording."""
        if self.streaming and not self._has_rows:
            raise cannot_stream(self.source)
        if self.source in _MADE:
            check_maker(self.source)
            return
        require("soundfile", "speech", "recordings are read by soundfile")
        with named_files():
            if self._has_rows:
                check_tables(self)
                return
            root = Path(self.source).expanduser()
            if not root.is_dir():
                raise UserError(f"data: {self.source!r} is no folder; give one with recordings, or made")
            if not any(path.suffix.lower() in SUFFIXES for path in list_files(root)):
                raise UserError(f"data: there are no FLAC or WAV files in {str(root)!r}; give a folder of recordings")

    def open(self, sample_rate: int, num_samples: int) -> NumberedDataSet | StreamedRows:
        """Find the recordings and, where they are not streamed, look into each one's header."""
        self.check_source()
        budget = ErrorBudget(self.max_bad_samples)
        if self._has_rows and self.streaming:
            return self._open_streamed(sample_rate, num_samples, budget)
        splits: list[NumberedSpeech]
        if self._has_rows:
            splits = self._rows(sample_rate, num_samples, budget)
        elif self.source in _MADE:
            splits = self._digits(sample_rate, num_samples)
        else:
            splits = self._folder(sample_rate, num_samples, budget)
        return speech_data_set(splits, sample_rate, num_samples, self.transcripts)

    @property
    def _has_rows(self) -> bool:
        """Whether recordings lie in the rows of tables rather than in files of their own."""
        return self.source not in _MADE and has_rows(self.source, SUFFIXES)

    def _digits(self, sample_rate: int, num_samples: int) -> list[NumberedSpeech]:
        maker = choose_maker(self.source)
        kept = held_out_names(map(str, SPEAKERS), self.validation_fraction)
        splits = ([each for each in SPEAKERS if (str(each) in kept) == side] for side in (False, True))
        return [SpokenDigits(maker, speakers, sample_rate, num_samples) for speakers in splits]

    def _folder(self, sample_rate: int, num_samples: int, budget: ErrorBudget) -> list[NumberedSpeech]:
        root = Path(self.source).expanduser()
        with named_files():
            found = find_speech(root, sample_rate, budget, self.transcripts)
        usable = without_longer(found, num_samples) if self.transcripts else found
        return [SpeechFiles(split, num_samples, budget) for split in self._split(usable, own_parts(root))]

    def _split(self, found: list[SpeechFile], own: tuple[str, str] | None) -> list[list[SpeechFile]]:
        """Recordings to train on and to evaluate with; no speaker is on both sides."""
        if own is not None:
            return [[each for each in found if each.name.startswith(f"{part}/")] for part in own]
        kept = held_out_names({each.speaker for each in found}, self.validation_fraction) if found else set()
        return [[each for each in found if (each.speaker in kept) == side] for side in (False, True)]

    def _rows(self, sample_rate: int, num_samples: int, budget: ErrorBudget) -> list[NumberedSpeech]:
        splits = list[NumberedSpeech]()
        for dataset, rows in load_splits(*find_sources(self), self.validation_fraction, budget):
            sounds = self._sounds(dataset)
            found = self._recordings(dataset, sounds, rows, sample_rate, budget)
            usable = without_longer(found, num_samples) if self.transcripts else found
            splits.append(SpeechFiles(usable, num_samples, budget, self._loader(sounds)))
        return splits

    def _open_streamed(self, sample_rate: int, num_samples: int, budget: ErrorBudget) -> StreamedRows:
        columns = {"audio_column": self.audio_column} | ({"text_column": self.text_column} if self.transcripts else {})
        reader = SpeechRows(self.audio_column, columns.get("text_column"), sample_rate, num_samples)

        splits = open_splits(
            *find_sources(self),
            self.validation_fraction,
            lambda each: Shards(load_files(each, columns, "Audio", budget), reader.hold, each.name, budget),
        )
        return StreamedRows(splits, reader, self.known_sizes, budget, ThreadPoolExecutor(_NUM_THREADS, "speech").map)

    def _sounds(self, dataset: Any) -> Any:
        """The column of sound alone, as the bytes of its files."""
        from datasets import Audio

        check_column(self.source, "audio_column", self.audio_column, dataset.column_names)
        check_kind(self.source, "audio_column", self.audio_column, dataset.features[self.audio_column], "Audio")
        return dataset.select_columns([self.audio_column]).cast_column(self.audio_column, Audio(decode=False))

    def _recordings(
        self, dataset: Any, sounds: Any, rows: RowNumbers, sample_rate: int, budget: ErrorBudget
    ) -> list[SpeechFile]:
        from datasets import Value

        features = {"num_samples": Value("int64"), "rate": Value("int64"), "problem": Value("string")}
        headers = map_once(sounds, header_in, [self.audio_column], [], features, "looking into recordings")[:]
        texts = self._texts(dataset) if self.transcripts else None
        recordings = []
        for row in rows.tolist():
            name, problem = f"row {row} of {dataset.split}", headers["problem"][row]
            text = "" if texts is None else as_transcript(texts[row])
            if problem or (texts is not None and not text):
                budget.add(name, OSError(problem or "it has no transcript"))
                continue
            check_rate(name, headers["rate"][row], sample_rate)
            recordings.append(SpeechFile(name, name, name, headers["num_samples"][row], text))
        return recordings

    def _loader(self, sounds: Any) -> Any:
        return lambda name: sound_in(sounds[int(name.split()[1])][self.audio_column])

    def _texts(self, dataset: Any) -> list[Any]:
        check_column(self.source, "text_column", self.text_column, dataset.column_names)
        texts: list[Any] = dataset.select_columns([self.text_column])[:][self.text_column]
        return texts
