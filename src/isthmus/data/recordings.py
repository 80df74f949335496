"""Recordings in a folder, with what was said beside them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import BadSamples
from isthmus.data.formants import Sound
from isthmus.data.split import held_out, walk

_SUFFIXES = frozenset({".flac", ".wav"})


@dataclass(frozen=True)
class Recording:
    """A file."""

    path: Path
    name: str  # relative to the folder
    speaker: str  # where LibriSpeech's layout tells; else the name again
    num_samples: int
    text: str


class FolderRecordings:
    """Some recordings of a folder. In the place of one that turns out to be damaged the next one is heard.

    Whether one is damaged is found out anew at every reading, so that what is heard depends on the files alone.
    """

    def __init__(self, recordings: list[Recording], num_samples: int, bad: BadSamples) -> None:
        self._recordings, self._num_samples, self._bad = recordings, num_samples, bad
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
            spare = max(0, recording.num_samples - self._num_samples)
            start = 0 if seed is None else int(np.random.default_rng(seed).integers(spare, endpoint=True))
            try:
                return read_sound(recording.path, start, recording.num_samples - spare), recording.text
            except OSError as error:
                self._bad.add(str(recording.path), error)
        raise UserError("data: all recordings are damaged; give others")


def find_recordings(root: Path, sample_rate: int, bad: BadSamples, transcripts: bool) -> list[Recording]:
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
            num_samples = _length(path, sample_rate)
            text = _text(path, lines) if transcripts else ""
        except OSError as error:
            bad.add(str(path), error)
            continue
        recordings.append(Recording(path, name, speaker, num_samples, text))
    return recordings


def split(recordings: list[Recording], fraction: float) -> tuple[list[Recording], list[Recording]]:
    """Training and validation recordings; no speaker is on both sides."""
    kept = held_out({each.speaker for each in recordings}, fraction) if recordings else set()
    return [each for each in recordings if each.speaker not in kept], [
        each for each in recordings if each.speaker in kept
    ]


def read_sound(path: Path, start: int, num_samples: int) -> Sound:
    """`num_samples` samples from `start` on, as float32; several channels become their mean.

    Raises:
        OSError: they cannot be read.
    """
    soundfile = _soundfile()
    try:
        sound, _ = soundfile.read(path, start=start, frames=num_samples, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if len(sound) < num_samples:
        raise OSError("it ends too early")
    mean: Sound = sound.mean(axis=1)
    return mean


def _length(path: Path, sample_rate: int) -> int:
    """Samples in a file, as its header says."""
    soundfile = _soundfile()
    try:
        known = soundfile.info(path)
    except soundfile.SoundFileError as error:
        raise OSError(_reason(error)) from error
    if known.samplerate != sample_rate:
        raise UserError(
            f"data: {str(path)!r} has {known.samplerate} samples a second, the model {sample_rate}: "
            f"resample the recordings, or set model.sample_rate to {known.samplerate}"
        )
    if not known.frames:
        raise OSError("it is empty")
    return int(known.frames)


def _read_lines(folder: Path) -> dict[str, str]:
    """{name: text} of LibriSpeech's files in a folder."""
    lines = [line for path in sorted(folder.glob("*.trans.txt")) for line in _read(path).splitlines()]
    return {name: text for name, _, text in (line.partition(" ") for line in lines)}


def _text(path: Path, lines: dict[str, str]) -> str:
    """What is said, in upper case."""
    beside = path.with_suffix(".txt")
    if path.stem not in lines and not beside.exists():
        raise OSError("it has no transcript")
    text = " ".join((lines[path.stem] if path.stem in lines else _read(beside)).upper().split())
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
