"""Speech of the `datasets` library: files here, or a name on the Hub; on disk or streamed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from isthmus.data.bad import ErrorBudget
from isthmus.data.cached import map_once
from isthmus.data.hub import Source, check_column, check_kind, find_sources, load_files
from isthmus.data.indexed import IndexedDataSet
from isthmus.data.options import check_options
from isthmus.data.packing import RowNumbers
from isthmus.data.recording_rows import RecordingRows
from isthmus.data.recordings import FoundRecordings, Recording, as_transcript, check_rate, look_into, without_longer
from isthmus.data.shards import Shards
from isthmus.data.sides import load_splits
from isthmus.data.speech import VOCABULARY, data_set_of
from isthmus.data.streamed import open_splits
from isthmus.data.streamed_rows import StreamedRows

_NUM_THREADS = 8  # that decode


@dataclass(frozen=True)
class HuggingFaceSpeech:
    """Recordings, in the batches of `speech`.

    On disk each one's header is looked into once, which the cache of `datasets` remembers. The validation data are
    `validation_split`, or else rows chosen by their number, alike on all machines.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers. Without `validation_split` every so many rows of each shard are held out. Texts are
    padded to the longest of their batch.
    """

    name: str  # a folder, a file or pattern of files, their address, or a name on the Hub
    config: str | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.05  # of the rows, where there is no validation_split
    audio_column: str = "audio"
    text_column: str = "text"
    transcripts: bool = True  # read what was said, and leave out recordings that are longer than a sample
    streaming: bool = False
    max_bad_samples: int = 10  # rows without sound or text: passed over; one more ends the run

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, sample_rate: int, num_samples: int) -> IndexedDataSet | StreamedRows:
        """Find the recordings; on disk, look into each one's header."""
        bad, places = ErrorBudget(self.max_bad_samples), find_sources(self, self.streaming)
        opened = self._open_streamed if self.streaming else self._open_on_disk
        return opened(*places, sample_rate, num_samples, bad)

    def _open_on_disk(
        self, place: Source, held_out_place: Source | None, sample_rate: int, num_samples: int, bad: ErrorBudget
    ) -> IndexedDataSet:
        sides = list[FoundRecordings]()
        for dataset, rows in load_splits(place, held_out_place, self.validation_fraction, bad):
            sounds = self._sounds(dataset)
            found = self._recordings(dataset, sounds, rows, sample_rate, bad)
            usable = without_longer(found, num_samples) if self.transcripts else found
            sides.append(FoundRecordings(usable, num_samples, bad, self._loader(sounds)))
        return data_set_of(sides, sample_rate, num_samples, self.transcripts)

    def _open_streamed(
        self, place: Source, held_out_place: Source | None, sample_rate: int, num_samples: int, bad: ErrorBudget
    ) -> StreamedRows:
        columns = {"audio_column": self.audio_column} | ({"text_column": self.text_column} if self.transcripts else {})
        reader = RecordingRows(self.audio_column, columns.get("text_column"), sample_rate, num_samples)

        def load_shards(place: Source) -> Shards:
            return Shards(load_files(place, self.name, columns, "Audio", bad), reader.hold, self.name, bad)

        sides = open_splits(place, held_out_place, self.validation_fraction, load_shards)
        sizes = {"vocab_size": len(VOCABULARY)} if self.transcripts else {}
        return StreamedRows(sides, reader, sizes, bad, ThreadPoolExecutor(_NUM_THREADS, "speech").map)

    def _sounds(self, dataset: Any) -> Any:
        """The column of sound alone, as the bytes of its files."""
        from datasets import Audio

        check_column(self.name, "audio_column", self.audio_column, dataset.column_names)
        check_kind(self.name, "audio_column", self.audio_column, dataset.features[self.audio_column], "Audio")
        return dataset.select_columns([self.audio_column]).cast_column(self.audio_column, Audio(decode=False))

    def _recordings(
        self, dataset: Any, sounds: Any, rows: RowNumbers, sample_rate: int, bad: ErrorBudget
    ) -> list[Recording]:
        from datasets import Value

        features = {"num_samples": Value("int64"), "rate": Value("int64"), "problem": Value("string")}
        headers = map_once(sounds, _header, [self.audio_column], [], features, "looking into recordings")[:]
        texts = self._texts(dataset) if self.transcripts else None
        recordings = []
        for row in rows.tolist():
            place, problem = f"row {row} of {dataset.split}", headers["problem"][row]
            text = "" if texts is None else as_transcript(texts[row])
            if problem or (texts is not None and not text):
                bad.add(place, OSError(problem or "it has no transcript"))
                continue
            check_rate(place, headers["rate"][row], sample_rate)
            recordings.append(Recording(place, place, place, headers["num_samples"][row], text))
        return recordings

    def _loader(self, sounds: Any) -> Callable[[str], Path | BinaryIO]:
        return lambda place: _file(sounds[int(place.split()[1])][self.audio_column])

    def _texts(self, dataset: Any) -> list[Any]:
        check_column(self.name, "text_column", self.text_column, dataset.column_names)
        texts: list[Any] = dataset.select_columns([self.text_column])[:][self.text_column]
        return texts


def _header(audio: dict[str, Any]) -> dict[str, Any]:
    try:
        num_samples, rate = look_into(_file(audio))
    except OSError as error:
        return {"num_samples": 0, "rate": 0, "problem": error.strerror or str(error)}
    return {"num_samples": num_samples, "rate": rate, "problem": ""}


def _file(audio: dict[str, Any] | None) -> Path | BinaryIO:
    """What a cell holds: the bytes of a file, or where it is.

    Raises:
        OSError: neither.
    """
    if audio and audio["bytes"] is not None:
        return BytesIO(audio["bytes"])
    if audio and audio["path"] is not None:
        return Path(audio["path"])
    raise OSError("it has no sound")
