"""Speech in files: recordings of a folder, with what was said beside them, or of a table; and how sound is read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.errors import TO_UTF_8, ErrorBudget
from isthmus.data.source import list_files
from isthmus.data.spoken_digits import Sound

SUFFIXES = frozenset({".flac", ".wav"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechFile:
    """A recording: where it is, and what is known of it."""

    location: str  # a file, or the row of a table
    name: str  # of a file relative to the folder
    speaker: str  # where LibriSpeech's layout tells; else the name again
    num_samples: int
    text: str


class SpeechFiles:
    """Recordings by number. In the place of one that turns out to be damaged the next one is heard.

    Whether one is damaged is found out anew at every reading, so that what is heard depends on the data alone.

    Args:
        recordings: to train on, or to evaluate with.
        num_samples: that are heard at most.
        budget: where those go that turn out to be damaged.
        load: opens what is at a location.
    """

    def __init__(
        self,
        recordings: list[SpeechFile],
        num_samples: int,
        budget: ErrorBudget,
        load: Callable[[str], Path | BinaryIO] = Path,
    ) -> None:
        self._recordings, self._num_samples, self._budget, self._load = recordings, num_samples, budget, load
        known = "".join(f"{each.name} {each.num_samples} {each.text}\n" for each in recordings)
        self.fingerprint = f"{hashlib.sha256(known.encode()).hexdigest()} {num_samples}"

    def __len__(self) -> int:
        return len(self._recordings)

    def longest_text(self) -> int:
        """Return how many letters the longest text has."""
        return max((len(each.text) for each in self._recordings), default=0)

    def hear(self, index: int, seed: int | None) -> tuple[Sound, str]:
        """Return what is heard ([num_samples] float32), and what is said.

        Of a recording that is too long, a part that the seed chooses, or its beginning.

        Raises:
            UserError: too many files are damaged.
        """
        for number in range(index, index + len(self)):
            recording = self._recordings[number % len(self)]
            try:
                file = self._load(recording.location)
                return read_part(file, recording.num_samples, self._num_samples, seed), recording.text
            except OSError as error:
                self._budget.add(recording.location, error)
        raise UserError("data: all recordings are damaged; give others")


def find_speech(root: Path, sample_rate: int, budget: ErrorBudget, transcripts: bool) -> list[SpeechFile]:
    """Return all FLAC and WAV files below a folder, sorted, with what was said where it is asked for.

    The texts stand beside them: in LibriSpeech's `*.trans.txt` (a line each: name, text), or in `name.txt`.

    Raises:
        UserError: there are none, one has another sample rate, or too many cannot be used.
    """
    paths = sorted(path for path in list_files(root) if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise UserError(f"data: there are no FLAC or WAV files in {str(root)!r}; give a folder of recordings")
    said = {folder: _read_lines(folder) for folder in {path.parent for path in paths}}
    recordings = []
    for path in paths:
        lines, name = said[path.parent], path.relative_to(root).as_posix()
        speaker = path.stem.split("-", 1)[0] if path.stem in lines else name
        try:
            num_samples, rate = read_header(path)
            check_rate(str(path), rate, sample_rate)
            text = _text(path, lines) if transcripts else ""
        except OSError as error:
            budget.add(str(path), error)
            continue
        recordings.append(SpeechFile(str(path), name, speaker, num_samples, text))
    return recordings


def without_longer(recordings: list[SpeechFile], num_samples: int) -> list[SpeechFile]:
    """Return those whose whole text is heard; log how many others there are."""
    fitting = [each for each in recordings if each.num_samples <= num_samples]
    if len(fitting) < len(recordings):
        _log.warning(
            "data: %d of %d recordings are longer than %d samples and left out, as their transcripts would not fit",
            len(recordings) - len(fitting),
            len(recordings),
            num_samples,
        )
    return fitting


def read_part(file: Path | BinaryIO, length: int, num_samples: int, seed: int | None) -> Sound:
    """Return [at most num_samples] float32 of a recording of `length` samples.

    Of one that is too long, a part that the seed chooses, or its beginning.

    Raises:
        OSError: it cannot be read.
    """
    spare = max(0, length - num_samples)
    start = 0 if seed is None else int(np.random.default_rng(seed).integers(spare, endpoint=True))
    return read_sound(file, start, length - spare)


def read_sound(file: Path | BinaryIO, start: int, num_samples: int) -> Sound:
    """Return `num_samples` samples from `start` on, as float32; several channels become their mean.

    Raises:
        OSError: they cannot be read.
    """
    import soundfile

    try:
        sound, _ = soundfile.read(file, start=start, frames=num_samples, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if len(sound) < num_samples:
        raise OSError("it ends too early")
    mean: Sound = sound.mean(axis=1)
    return mean


def read_header(file: Path | BinaryIO) -> tuple[int, int]:
    """Return how many samples there are, and how many a second, as the header says.

    Raises:
        OSError: there are none, or the header cannot be read.
    """
    import soundfile

    try:
        known = soundfile.info(file)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if not known.frames:
        raise OSError("it is empty")
    return int(known.frames), int(known.samplerate)


def as_transcript(said: object) -> str:
    """Return what is said in upper case, words apart by one blank; empty where it is no text."""
    return " ".join(said.upper().split()) if isinstance(said, str) else ""


def check_rate(name: str, rate: int, wanted: int) -> None:
    """Refuse a recording with another number of samples a second than the model's."""
    if rate != wanted:
        raise UserError(
            f"data: {name!r} has {rate} samples a second, the model {wanted}: "
            f"resample the recordings, or set model.sample_rate to {rate}"
        )


def _read_lines(folder: Path) -> dict[str, str]:
    """{name: text} of LibriSpeech's files in a folder."""
    lines = [line for path in sorted(folder.glob("*.trans.txt")) for line in _read(path).splitlines()]
    return {name: text for name, _, text in (line.partition(" ") for line in lines)}


def _text(path: Path, lines: dict[str, str]) -> str:
    """What is said, in upper case."""
    beside = path.with_suffix(".txt")
    if path.stem not in lines and not beside.exists():
        raise OSError("it has no transcript")
    text = as_transcript(lines[path.stem] if path.stem in lines else _read(beside))
    if not text:
        raise OSError("its transcript is empty")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(0, f"it is not UTF-8: {TO_UTF_8}", str(path)) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error))
