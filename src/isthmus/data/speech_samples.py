"""Speech as samples of one shape: sound, how much of it is no padding, and the numbers of the letters that are said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from isthmus.data.base import Positions
from isthmus.data.sample_order import NumberedDataSet
from isthmus.data.speech_files import SpeechFiles, as_transcript, check_rate, read_header, read_part
from isthmus.data.spoken_digits import Sound, SpokenDigits
from isthmus.data.streamed_rows import file_in
from isthmus.inner.step import Batch

_log = logging.getLogger(__name__)

# of wav2vec 2.0's published models: a letter's number is its place
VOCABULARY = ("<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ")
_NUMBERS = {letter: number for number, letter in enumerate(VOCABULARY)} | {" ": VOCABULARY.index("|")}
_UNKNOWN, _NO_LETTER = VOCABULARY.index("<unk>"), -100
NumberedSpeech = SpeechFiles | SpokenDigits
Held = tuple[bytes, int, str]  # a file, how many samples it has, what is said


def speech_data_set(
    splits: Sequence[NumberedSpeech], sample_rate: int, num_samples: int, transcripts: bool
) -> NumberedDataSet:
    """Return recordings to train on and to evaluate with, as a model wants them, with texts or without."""
    longest = max(each.longest_text() for each in splits) if transcripts else None
    train, validation = (SpeechSamples(each, sample_rate, num_samples, longest) for each in splits)
    return NumberedDataSet(train, validation, {"vocab_size": len(VOCABULARY)} if transcripts else {})


class SpeechSamples:
    """Recordings as samples of one shape; without `longest_text` texts are left out."""

    def __init__(
        self, recordings: NumberedSpeech, sample_rate: int, num_samples: int, longest_text: int | None = None
    ) -> None:
        self._recordings, self._num_samples, self._longest_text = recordings, num_samples, longest_text
        self.tokens_per_sample = seconds(num_samples, sample_rate)
        self.fingerprint = f"{recordings.fingerprint} {longest_text}"

    def __len__(self) -> int:
        return len(self._recordings)

    def read(self, indices: Positions, seeds: Positions | None) -> Batch:
        """Return the sound, how much of it is no padding, and what is said: see `speech_batch`."""
        chosen = [None] * len(indices) if seeds is None else seeds.tolist()
        heard = [self._recordings.hear(index, seed) for index, seed in zip(indices.tolist(), chosen, strict=True)]
        return speech_batch(heard, self._num_samples, self._longest_text)


class SpeechRows:
    """Rows of a recording's file and, where there is a text column, what is said; a `streamed_rows.RowReader`."""

    def __init__(self, audio_column: str, text_column: str | None, sample_rate: int, num_samples: int) -> None:
        self._audio_column, self._text_column = audio_column, text_column
        self._sample_rate, self._num_samples = sample_rate, num_samples
        self._longer = set[str]()  # names of rows
        self.tokens_per_sample = seconds(num_samples, sample_rate)
        self.form = (audio_column, text_column, num_samples)

    def hold(self, columns: dict[str, Any], name: str) -> Held | None:
        """Return the recording's file, its length and its transcript; None where that would not fit."""
        content = file_in(columns[self._audio_column], name)
        num_samples, rate = read_header(BytesIO(content))
        check_rate(name, rate, self._sample_rate)
        if self._text_column is None:
            return content, num_samples, ""
        if num_samples > self._num_samples:
            self._count_longer(name)
            return None
        text = as_transcript(columns[self._text_column])
        if not text:
            raise TypeError("it has no transcript")
        return content, num_samples, text

    def decode(self, held: Held, seed: int | None) -> tuple[Sound, str]:
        """Return what is heard ([at most num_samples] float32), and what is said."""
        content, num_samples, text = held
        return read_part(BytesIO(content), num_samples, self._num_samples, seed), text

    def batch(self, samples: list[tuple[Sound, str]]) -> Batch:
        """Return the samples in the form of `speech`, texts padded to the longest of the batch."""
        longest = None if self._text_column is None else max(len(text) for _, text in samples)
        return speech_batch(samples, self._num_samples, longest)

    def _count_longer(self, name: str) -> None:
        known = len(self._longer)
        self._longer.add(name)
        count = len(self._longer)
        if count == known or count.bit_count() != 1:  # the first, second, fourth, ... are said
            return
        _log.warning(
            "data: %r is longer than %d samples and passed over, as its transcript would not fit: %d so far",
            name,
            self._num_samples,
            count,
        )


def seconds(num_samples: int, sample_rate: int) -> int:
    """Return what a sample counts for."""
    return max(1, round(num_samples / sample_rate))


def speech_batch(heard: Sequence[tuple[Sound, str]], num_samples: int, longest_text: int | None) -> Batch:
    """Return what is heard and said, in one shape.

    Args:
        heard: sounds ([at most num_samples] float32), and what is said.
        num_samples: that every sound is padded to.
        longest_text: letters that every text is padded to; None leaves texts out.

    Returns:
        {"audio": [batch, num_samples] float32, "length": [batch] int64, of what is no padding} and, where texts are
        asked for, {"text": [batch, longest_text] int64}, numbers of letters padded with -100.
    """
    audio = torch.zeros(len(heard), num_samples)
    text = torch.full((len(heard), longest_text or 0), _NO_LETTER)
    for row, (sound, said) in enumerate(heard):
        audio[row, : len(sound)] = torch.from_numpy(normalised(sound))
        if longest_text is not None:
            text[row, : len(said)] = torch.tensor(encode(said))
    batch = {"audio": audio, "length": torch.tensor([len(sound) for sound, _ in heard])}
    return batch if longest_text is None else batch | {"text": text}


def normalised(sound: Sound) -> Sound:
    """Return the sound with zero mean and unit variance, as published."""
    result: Sound = (sound - sound.mean()) / np.sqrt(sound.var() + np.float32(1e-7))
    return result


def encode(text: str) -> list[int]:
    """Return the numbers of the letters, which are upper case; what has none is `<unk>`."""
    return [_NUMBERS.get(letter, _UNKNOWN) for letter in text]


def header_in(audio: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the header of a cell's file says: {"num_samples", "rate", "problem"}."""
    try:
        num_samples, rate = read_header(sound_in(audio))
    except OSError as error:
        return {"num_samples": 0, "rate": 0, "problem": error.strerror or str(error)}
    return {"num_samples": num_samples, "rate": rate, "problem": ""}


def sound_in(audio: dict[str, Any] | None) -> Path | BinaryIO:
    """Return what a cell holds: the bytes of a file, or where it is.

    Raises:
        OSError: neither.
    """
    if audio and audio["bytes"] is not None:
        return BytesIO(audio["bytes"])
    if audio and audio["path"] is not None:
        return Path(audio["path"])
    raise OSError("it has no sound")
