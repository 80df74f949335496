"""Speech: spoken digits made on the spot, or recordings in a folder, with or without what was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.formants import Sound
from isthmus.data.indexed import IndexedDataSet, Indices
from isthmus.data.made_speech import SPEAKERS, MadeRecordings, choose_maker
from isthmus.data.options import check_options
from isthmus.data.recordings import FoundRecordings, find_recordings, split, without_longer
from isthmus.data.split import held_out
from isthmus.inner.step import Batch

# of wav2vec 2.0's published models: a letter's number is its place
VOCABULARY = ("<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ")
_NUMBERS = {letter: number for number, letter in enumerate(VOCABULARY)} | {" ": VOCABULARY.index("|")}
_UNKNOWN, _NO_LETTER = VOCABULARY.index("<unk>"), -100
_MADE = ("made", "espeak", "formants")


class Recordings(Protocol):
    """Recordings by number."""

    @property
    def fingerprint(self) -> str:
        """Differs where a number stands for another recording."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def longest_text(self) -> int:
        """Letters of the longest text."""
        ...

    def hear(self, index: int, seed: int | None) -> tuple[Sound, str]:
        """What is heard ([at most num_samples] float32) and what is said; the seed decides what is random about it."""
        ...


@dataclass(frozen=True)
class Speech:
    """Recordings, all cut or padded to the model's `num_samples`, with zero mean and unit variance.

    Recordings are split by speaker where that is known (LibriSpeech's layout, spoken digits), else by file: a hash of
    the name says on which side one lies.

    Attributes:
        source: a folder of FLAC and WAV files; or "made": digits spoken by espeak-ng where that is installed, else by
            formant synthesis; or "espeak" or "formants", to have the same everywhere.
        transcripts: read what was said, and leave out recordings that are longer than `num_samples`, whose texts would
            be wrong; without, of a longer one a random part is taken every time.
        validation_fraction: about how much is kept for validation.
        max_bad_samples: files that cannot be used, and are skipped, before that is an error.
    """

    source: str = "made"
    transcripts: bool = True
    validation_fraction: float = 0.05
    max_bad_samples: int = 10

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, sample_rate: int, num_samples: int) -> IndexedDataSet:
        """Find the recordings, and look into each one's header."""
        sides = self._made(sample_rate, num_samples) if self.source in _MADE else self._found(sample_rate, num_samples)
        return data_set_of(sides, sample_rate, num_samples, self.transcripts)

    def _made(self, sample_rate: int, num_samples: int) -> list[Recordings]:
        maker = choose_maker(self.source)
        kept = held_out(map(str, SPEAKERS), self.validation_fraction)
        sides = ([each for each in SPEAKERS if (str(each) in kept) == side] for side in (False, True))
        return [MadeRecordings(maker, speakers, sample_rate, num_samples) for speakers in sides]

    def _found(self, sample_rate: int, num_samples: int) -> list[Recordings]:
        root, bad = Path(self.source).expanduser(), ErrorBudget(self.max_bad_samples)
        if not root.is_dir():
            raise UserError(f"data: {self.source!r} is no folder; give one with recordings, or made")
        try:
            found = find_recordings(root, sample_rate, bad, self.transcripts)
        except OSError as error:
            raise UserError(f"data: cannot read {error.filename!r}: {error.strerror}") from error
        usable = without_longer(found, num_samples) if self.transcripts else found
        return [FoundRecordings(side, num_samples, bad) for side in split(usable, self.validation_fraction)]


def data_set_of(sides: Sequence[Recordings], sample_rate: int, num_samples: int, transcripts: bool) -> IndexedDataSet:
    """Recordings to train on and to evaluate with, as batches for a model; with what is said where it is asked for."""
    longest = max(side.longest_text() for side in sides) if transcripts else None
    train, validation = (SpeechSamples(side, sample_rate, num_samples, longest) for side in sides)
    return IndexedDataSet(train, validation, {"vocab_size": len(VOCABULARY)} if transcripts else {})


class SpeechSamples:
    """Recordings as samples of one shape.

    Args:
        recordings: by number.
        sample_rate: in Hz.
        num_samples: that every recording is cut or padded to.
        longest_text: letters that every text is padded to; None leaves texts out.
    """

    def __init__(
        self, recordings: Recordings, sample_rate: int, num_samples: int, longest_text: int | None = None
    ) -> None:
        self._recordings, self._num_samples, self._longest_text = recordings, num_samples, longest_text
        self.tokens_per_sample = seconds(num_samples, sample_rate)
        self.fingerprint = f"{recordings.fingerprint} {longest_text}"

    def __len__(self) -> int:
        """How many recordings there are."""
        return len(self._recordings)

    def read(self, indices: Indices, seeds: Indices | None) -> Batch:
        """The sound, how much of it is no padding, and what is said: see `batch_of`."""
        chosen = [None] * len(indices) if seeds is None else seeds.tolist()
        heard = [self._recordings.hear(index, seed) for index, seed in zip(indices.tolist(), chosen, strict=True)]
        return batch_of(heard, self._num_samples, self._longest_text)


def seconds(num_samples: int, sample_rate: int) -> int:
    """What a sample counts for."""
    return max(1, round(num_samples / sample_rate))


def batch_of(heard: Sequence[tuple[Sound, str]], num_samples: int, longest_text: int | None) -> Batch:
    """What is heard and said, in one shape.

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
    """Zero mean and unit variance, as published."""
    return (sound - sound.mean()) / np.sqrt(sound.var() + np.float32(1e-7))


def encode(text: str) -> list[int]:
    """Numbers of the letters, which are upper case; what has none is `<unk>`."""
    return [_NUMBERS.get(letter, _UNKNOWN) for letter in text]
