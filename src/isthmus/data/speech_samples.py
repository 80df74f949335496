"""Speech as samples of one shape: sound, how much of it is no padding, and the numbers of the letters that are said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.inner.step import Batch

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
        longest = max(len(said) for _, said in samples) if longest_text is None else longest_text
        audio, text = torch.zeros(len(samples), self.num_samples), torch.full((len(samples), longest), _NO_LETTER)
        for row, (sound, said) in enumerate(samples):
            audio[row, : len(sound)] = torch.from_numpy(normalised(sound))
            if self.transcripts:
                text[row, : len(said)] = torch.tensor(encode(said))
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


def _unreadable(error: Exception) -> OSError:
    return OSError(str(getattr(error, "error_string", error)))
