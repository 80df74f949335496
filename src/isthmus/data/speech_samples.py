"""Files of speech with what is said in them, and samples of one shape: sound, its length, the numbers of letters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.errors import TO_UTF_8, ErrorBudget
from isthmus.data.source import list_files
from isthmus.inner.step import Batch

_log = logging.getLogger(__name__)
Sound = npt.NDArray[np.float32]  # [num_samples]
Utterance = tuple[Sound, str]  # what is heard ([at most num_samples]), and what is said

# of wav2vec 2.0's published models: a letter's number is its place
VOCABULARY = ("<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ")
_NUMBERS = {letter: number for number, letter in enumerate(VOCABULARY)} | {" ": VOCABULARY.index("|")}
_UNKNOWN, _NO_LETTER = VOCABULARY.index("<unk>"), -100


@dataclass(frozen=True)
class SpeechShape:
    """The form in which a model wants speech: `num_samples` at a rate, with or without transcripts."""

    sample_rate: int
    num_samples: int
    transcripts: bool

    @property
    def tokens_per_sample(self) -> int:
        """The seconds of a sample, at least 1."""
        return max(1, round(self.num_samples / self.sample_rate))

    def check_rate(self, name: str, rate: int) -> None:
        """Refuse a recording with another number of samples a second than the model's."""
        if rate != self.sample_rate:
            raise UserError(
                f"data: {name!r} has {rate} samples a second, the model {self.sample_rate}: "
                f"resample the recordings, or set model.sample_rate to {rate}"
            )

    def fits(self, num_samples: int) -> bool:
        """Whether the whole transcript of so many samples is heard."""
        return not self.transcripts or num_samples <= self.num_samples

    def read(self, recording: tuple[Path | BytesIO | bytes, int, str], seed: int | None) -> Utterance:
        """Return a recording: its file, length and text; of a longer one the part that a seed chooses, or the first."""
        file, length, text = recording
        spare = max(0, length - self.num_samples)
        start = 0 if seed is None else int(np.random.default_rng(seed).integers(spare, endpoint=True))
        return read_sound(BytesIO(file) if isinstance(file, bytes) else file, start, length - spare), text

    def batch(self, samples: Sequence[Utterance], longest_text: int | None = None) -> Batch:
        """Return samples in one shape.

        Args:
            samples: at least one.
            longest_text: letters that every text is padded to; None: as many as the longest here has.

        Returns:
            {"audio": [batch, num_samples] float32, "length": [batch] int64, of what is no padding} and, with
            transcripts, {"text": [batch, longest_text] int64}, numbers of letters padded with -100.
        """
        longest = max(len(words) for _, words in samples) if longest_text is None else longest_text
        audio, text = torch.zeros(len(samples), self.num_samples), torch.full((len(samples), longest), _NO_LETTER)
        for row, (sound, words) in enumerate(samples):
            audio[row, : len(sound)] = torch.from_numpy(normalised(sound))
            if self.transcripts:
                text[row, : len(words)] = torch.tensor(encode(words))
        batch = {"audio": audio, "length": torch.tensor([len(sound) for sound, _ in samples])}
        return batch | {"text": text} if self.transcripts else batch


def normalised(sound: Sound) -> Sound:
    """Return the sound with zero mean and unit variance, as published."""
    result: Sound = (sound - sound.mean()) / np.sqrt(sound.var() + np.float32(1e-7))
    return result


def encode(text: str) -> list[int]:
    """Return the numbers of the letters, which are upper case; what has none is `<unk>`."""
    return [_NUMBERS.get(letter, _UNKNOWN) for letter in text]


def as_transcript(text: object) -> str:
    """Return a text in upper case, words apart by one blank; empty where it is none."""
    return " ".join(text.upper().split()) if isinstance(text, str) else ""


def read_sound(file: Path | BytesIO, start: int, num_samples: int) -> Sound:
    """Return `num_samples` samples from `start` on, as float32; several channels become their mean.

    Raises:
        OSError: they cannot be read.
    """
    import soundfile

    try:
        sound, _ = soundfile.read(file, start=start, frames=num_samples, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise _unreadable(error) from error
    if len(sound) < num_samples:
        raise OSError("it ends too early")
    mean: Sound = sound.mean(axis=1)
    return mean


def read_header(file: Path | BytesIO) -> tuple[int, int]:
    """Return how many samples there are, and how many a second, as the header says.

    Raises:
        OSError: there are none, or the header cannot be read.
    """
    import soundfile

    try:
        header: Any = soundfile.info(file)
    except soundfile.SoundFileError as error:
        raise _unreadable(error) from error
    if not header.frames:
        raise OSError("it is empty")
    return int(header.frames), int(header.samplerate)


@dataclass(frozen=True)
class SpeechFile:
    """A recording: where it is, and what is known of it."""

    location: str  # a file, or the row of a table
    name: str  # of a file relative to the folder
    speaker: str  # where LibriSpeech's layout tells; else the name again
    num_samples: int
    text: str


def find_speech(root: Path, suffixes: Collection[str], shape: SpeechShape, budget: ErrorBudget) -> list[SpeechFile]:
    """Return all files of speech below a folder, sorted, with what was said where it is asked for.

    The texts stand beside them: in LibriSpeech's `*.trans.txt` (a line each: name, text), or in `name.txt`.

    Raises:
        UserError: one has another sample rate, or too many cannot be used.
    """
    paths = sorted(path for path in list_files(root) if path.suffix.lower() in suffixes)
    lines_in = {folder: _read_lines(folder) for folder in {path.parent for path in paths}}
    files = []
    for path in paths:
        lines, name = lines_in[path.parent], path.relative_to(root).as_posix()
        speaker = path.stem.split("-", 1)[0] if path.stem in lines else name
        try:
            num_samples, rate = read_header(path)
            shape.check_rate(str(path), rate)
            text = _transcript(path, lines) if shape.transcripts else ""
        except OSError as error:
            budget.add(str(path), error)
            continue
        files.append(SpeechFile(str(path), name, speaker, num_samples, text))
    return files


def that_fit(files: list[SpeechFile], shape: SpeechShape) -> list[SpeechFile]:
    """Return the files whose whole transcript is heard; log how many others there are."""
    fitting = [file for file in files if shape.fits(file.num_samples)]
    if len(fitting) < len(files):
        _log.warning(
            "data: %d of %d recordings are longer than %d samples and left out, as their transcripts would not fit",
            len(files) - len(fitting),
            len(files),
            shape.num_samples,
        )
    return fitting


def _read_lines(folder: Path) -> dict[str, str]:
    """{name: text} of LibriSpeech's files in a folder."""
    lines = [line for path in sorted(folder.glob("*.trans.txt")) for line in _read(path).splitlines()]
    return {name: text for name, _, text in (line.partition(" ") for line in lines)}


def _transcript(path: Path, lines: dict[str, str]) -> str:
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


def _unreadable(error: Exception) -> OSError:
    return OSError(str(getattr(error, "error_string", error)))
