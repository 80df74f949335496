"""Recordings that are found: in a folder, with what was said beside them, or in a table."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.formants import Sound
from isthmus.data.split import held_out, walk

_SUFFIXES = frozenset({".flac", ".wav"})


@dataclass(frozen=True)
class Recording:
    """Where one is, and what is known of it."""

    place: str  # a file, or the row of a table
    name: str  # of a file relative to the folder
    speaker: str  # where LibriSpeech's layout tells; else the name again
    num_samples: int
    text: str


class FoundRecordings:
    """Recordings by number. In the place of one that turns out to be damaged the next one is heard.

    Whether one is damaged is found out anew at every reading, so that what is heard depends on the data alone.

    Args:
        recordings: of one side.
        num_samples: that are heard at most.
        bad: where those go that turn out to be damaged.
        load: finds what is in a place.
    """

    def __init__(
        self,
        recordings: list[Recording],
        num_samples: int,
        bad: ErrorBudget,
        load: Callable[[str], Path | BinaryIO] = Path,
    ) -> None:
        self._recordings, self._num_samples, self._bad, self._load = recordings, num_samples, bad, load
        known = "".join(f"{each.name} {each.num_samples} {each.text}\n" for each in recordings)
        self.fingerprint = f"{hashlib.sha256(known.encode()).hexdigest()} {num_samples}"

    def __len__(self) -> int:
        """How many there are, damaged ones included."""
        return len(self._recordings)

    def longest_text(self) -> int:
        """Letters of the longest text."""
        return max((len(each.text) for each in self._recordings), default=0)

    def hear(self, index: int, seed: int | None) -> tuple[Sound, str]:
        """What is heard ([num_samples] float32), and what is said.

        Of a recording that is too long, a part that the seed chooses, or its beginning.

        Raises:
            UserError: too many files are damaged.
        """
        for number in range(index, index + len(self)):
            recording = self._recordings[number % len(self)]
            try:
                file = self._load(recording.place)
                return read_part(file, recording.num_samples, self._num_samples, seed), recording.text
            except OSError as error:
                self._bad.add(recording.place, error)
        raise UserError("data: all recordings are damaged; give others")


def find_recordings(root: Path, sample_rate: int, bad: ErrorBudget, transcripts: bool) -> list[Recording]:
    """All FLAC and WAV files below a folder, sorted, with what was said where it is asked for.

    The texts stand beside them: in LibriSpeech's `*.trans.txt` (a line each: name, text), or in `name.txt`.

    Raises:
        UserError: there are none, one has another sample rate, or too many cannot be used.
    """
    paths = [path for path in walk(root) if path.suffix.lower() in _SUFFIXES]
    if not paths:
        raise UserError(f"data: there are no FLAC or WAV files in {str(root)!r}; give a folder of recordings")
    said = {folder: _read_lines(folder) for folder in {path.parent for path in paths}}
    recordings = []
    for path in paths:
        lines, name = said[path.parent], path.relative_to(root).as_posix()
        speaker = path.stem.split("-", 1)[0] if path.stem in lines else name
        try:
            num_samples, rate = look_into(path)
            check_rate(str(path), rate, sample_rate)
            text = _text(path, lines) if transcripts else ""
        except OSError as error:
            bad.add(str(path), error)
            continue
        recordings.append(Recording(str(path), name, speaker, num_samples, text))
    return recordings


def split(recordings: list[Recording], fraction: float) -> tuple[list[Recording], list[Recording]]:
    """Training and validation recordings; no speaker is on both sides."""
    kept = held_out({each.speaker for each in recordings}, fraction) if recordings else set()
    return [each for each in recordings if each.speaker not in kept], [
        each for each in recordings if each.speaker in kept
    ]


def without_longer(recordings: list[Recording], num_samples: int) -> list[Recording]:
    """Those whose whole text is heard; how many others there are is said."""
    fitting = [each for each in recordings if each.num_samples <= num_samples]
    if len(fitting) < len(recordings):
        print(
            f"data: {len(recordings) - len(fitting)} of {len(recordings)} recordings are longer than {num_samples} "
            "samples and left out, as their transcripts would not fit",
            file=sys.stderr,
            flush=True,
        )
    return fitting


def read_part(file: Path | BinaryIO, length: int, num_samples: int, seed: int | None) -> Sound:
    """[at most num_samples] float32 of a recording of `length` samples.

    Of one that is too long, a part that the seed chooses, or its beginning.

    Raises:
        OSError: it cannot be read.
    """
    spare = max(0, length - num_samples)
    start = 0 if seed is None else int(np.random.default_rng(seed).integers(spare, endpoint=True))
    return read_sound(file, start, length - spare)


def read_sound(file: Path | BinaryIO, start: int, num_samples: int) -> Sound:
    """`num_samples` samples from `start` on, as float32; several channels become their mean.

    Raises:
        OSError: they cannot be read.
    """
    soundfile = _soundfile()
    try:
        sound, _ = soundfile.read(file, start=start, frames=num_samples, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if len(sound) < num_samples:
        raise OSError("it ends too early")
    mean: Sound = sound.mean(axis=1)
    return mean


def look_into(file: Path | BinaryIO) -> tuple[int, int]:
    """How many samples there are, and how many a second, as the header says.

    Raises:
        OSError: there are none, or the header cannot be read.
    """
    soundfile = _soundfile()
    try:
        known = soundfile.info(file)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if not known.frames:
        raise OSError("it is empty")
    return int(known.frames), int(known.samplerate)


def as_transcript(said: object) -> str:
    """What is said, in upper case, words apart by one blank; empty where it is no text."""
    return " ".join(said.upper().split()) if isinstance(said, str) else ""


def check_rate(place: str, rate: int, wanted: int) -> None:
    """Refuse a recording with another number of samples a second than the model's."""
    if rate != wanted:
        raise UserError(
            f"data: {place!r} has {rate} samples a second, the model {wanted}: "
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
        raise OSError(0, "it is not UTF-8", str(path)) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error))


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise UserError(
            "data: recordings are read by soundfile, which is not installed: pip install isthmus[speech]"
        ) from error
    return soundfile
