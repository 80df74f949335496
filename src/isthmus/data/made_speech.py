"""Recordings of spoken digits made on the spot: twenty speakers, every time a little different, with noise."""

from __future__ import annotations

import sys

import numpy as np

from isthmus.core.types import UserError
from isthmus.data import espeak
from isthmus.data.formants import DIGITS, Sound, Voice, speak

SPEAKERS = range(20)
_RECORDINGS = 100  # of every speaker
_TAKES = 3  # of every word by every speaker
_SLOT_SECONDS = 0.5  # in which a word is said
_LEAST_RATE = 4000  # Hz
_NOISE = (0.001, 0.01)  # of a word's loudness 0.1


class MadeRecordings:
    """Digits said by some speakers. Words are made when they are first needed, and kept.

    Who says what is fixed for every recording; which take it is, where exactly the words begin, and the noise differ
    with the seed.
    """

    def __init__(self, maker: str, speakers: list[int], sample_rate: int, num_samples: int) -> None:
        self._maker, self._speakers, self._sample_rate = maker, speakers, sample_rate
        if sample_rate < _LEAST_RATE:
            raise UserError(
                f"data: spoken digits need {_LEAST_RATE} samples a second, the model has {sample_rate}: "
                "raise model.sample_rate"
            )
        self._slot = round(_SLOT_SECONDS * sample_rate)
        self._most_words = num_samples // self._slot
        if not self._most_words:
            raise UserError(
                f"data: a spoken digit takes {self._slot} samples, the model has {num_samples}: raise model.num_samples"
            )
        self.fingerprint = f"{maker} {speakers} {sample_rate} {num_samples}"
        self._words = dict[tuple[str, int, int], Sound]()

    def __len__(self) -> int:
        """How many recordings there are."""
        return _RECORDINGS * len(self._speakers)

    def hear(self, index: int, seed: int | None) -> tuple[Sound, str]:
        """What is heard ([num_samples] float32), and what is said."""
        rng = np.random.default_rng([index, 0 if seed is None else seed])
        words, speaker = self._words_of(index), self._speakers[index % len(self._speakers)]
        slots = np.zeros((len(words), self._slot), np.float32)
        for slot, word in zip(slots, words, strict=True):
            said = self._word(word, speaker, int(rng.integers(_TAKES)))
            start = rng.integers(self._slot - len(said), endpoint=True)
            slot[start : start + len(said)] = said
        noise = rng.standard_normal(slots.size, np.float32)
        return slots.ravel() + np.float32(rng.uniform(*_NOISE)) * noise, " ".join(words)

    def longest_text(self) -> int:
        """Letters of the longest text there may be."""
        return self._most_words * (max(map(len, DIGITS)) + 1) - 1

    def _words_of(self, index: int) -> list[str]:
        rng = np.random.default_rng([index, *self._speakers])
        num_words = rng.integers((self._most_words + 1) // 2, self._most_words, endpoint=True)
        return [str(word) for word in rng.choice(list(DIGITS), num_words)]

    def _word(self, word: str, speaker: int, take: int) -> Sound:
        key = word, speaker, take
        if key not in self._words:
            voice = Voice.draw(np.random.default_rng(speaker))
            rng = np.random.default_rng([speaker, take, *word.encode()])
            if self._maker == "espeak":
                said = espeak.speak(word, speaker, rng, self._sample_rate)
            else:
                said = speak(word, voice, rng, self._sample_rate)
            self._words[key] = said[: self._slot]
        return self._words[key]


def choose_maker(source: str) -> str:
    """Who makes the words, espeak or formants, said in one line; `made` takes espeak-ng where it is installed.

    Raises:
        UserError: espeak-ng is asked for and not there.
    """
    if source == "espeak" and not espeak.installed():
        raise UserError("data: espeak-ng is not installed: install it, or choose source: formants")
    maker = "espeak" if source == "espeak" or (source == "made" and espeak.installed()) else "formants"
    print(f"data: spoken digits by {'espeak-ng' if maker == 'espeak' else 'formant synthesis'}", file=sys.stderr)
    return maker
