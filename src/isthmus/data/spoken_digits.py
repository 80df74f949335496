"""Recordings of spoken digits made on the spot: twenty speakers, every time a little different, with noise.

espeak-ng speaks where it is installed, else formants do: a source (pulses, noise) through a filter (the vocal tract's
resonances). Vowel formants: Peterson and Barney, "Control Methods Used in a Study of the Vowels", 1952 (men). The
model: Fant, "Acoustic Theory of Speech Production", 1960. Nobody would take it for a person; digits can be told apart.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.core.types import UserError
from isthmus.data.speech_samples import Sound

_Floats = npt.NDArray[np.floating[Any]]
_Complex = npt.NDArray[np.complexfloating[Any, Any]]

_log = logging.getLogger(__name__)
SPEAKERS = range(20)
_PER_SPEAKER = 100  # recordings
_TAKES = 3  # of every word by every speaker
_SLOT_SECONDS = 0.5  # in which a word is said
_LEAST_RATE = 4000  # Hz
_NOISE = (0.001, 0.01)  # of a word's loudness 0.1
_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5")
_HEADER_BYTES = 44  # of a WAV file
_LONGEST_SECONDS = 0.5
_FRAME_SECONDS, _HOPS = 0.02, 4  # the filter moves on every 5 ms
_BANDWIDTHS = (60.0, 90.0, 150.0, 200.0, 250.0)  # Hz
_HIGHER = (3500.0, 4500.0)  # formants above the third hardly move
_GLIDE = 8  # frames over which one sound becomes the next


class SpokenDigits:
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
        return _PER_SPEAKER * len(self._speakers)

    def say(self, index: int, seed: int | None) -> tuple[Sound, str]:
        """Return the sound of some words ([num_samples] float32), and the words."""
        rng = np.random.default_rng([index, 0 if seed is None else seed])
        words, speaker = self._words_of(index), self._speakers[index % len(self._speakers)]
        slots = np.zeros((len(words), self._slot), np.float32)
        for slot, word in zip(slots, words, strict=True):
            sound = self._word(word, speaker, int(rng.integers(_TAKES)))
            start = rng.integers(self._slot - len(sound), endpoint=True)
            slot[start : start + len(sound)] = sound
        noise = rng.standard_normal(slots.size, np.float32)
        return slots.ravel() + np.float32(rng.uniform(*_NOISE)) * noise, " ".join(words)

    def longest_text(self) -> int:
        """Return how many letters the longest text may have."""
        return self._most_words * (max(map(len, DIGITS)) + 1) - 1

    def _words_of(self, index: int) -> list[str]:
        rng = np.random.default_rng([index, *self._speakers])
        num_words = rng.integers((self._most_words + 1) // 2, self._most_words, endpoint=True)
        return [str(word) for word in rng.choice(list(DIGITS), num_words)]

    def _word(self, word: str, speaker: int, take: int) -> Sound:
        key = word, speaker, take
        if key not in self._words:
            rng = np.random.default_rng([speaker, take, *word.encode()])
            if self._maker == "espeak":
                sound = _espeak(word, speaker, rng, self._sample_rate)
            else:
                sound = speak(word, Voice.draw(np.random.default_rng(speaker)), rng, self._sample_rate)
            self._words[key] = sound[: self._slot]
        return self._words[key]


def has_espeak() -> bool:
    """Tell whether espeak-ng is installed."""
    return shutil.which("espeak-ng") is not None


def check_maker(source: str) -> None:
    """Refuse espeak-ng where it is asked for and not installed."""
    if source == "espeak" and not has_espeak():
        raise UserError("data: espeak-ng is not installed: install it, or choose source: formants")


def choose_maker(source: str) -> str:
    """Return who makes the words, espeak or formants, and log it; `made` takes espeak-ng where it is installed."""
    maker = "espeak" if source == "espeak" or (source == "made" and has_espeak()) else "formants"
    _log.info("data: spoken digits by %s", "espeak-ng" if maker == "espeak" else "formant synthesis")
    return maker


@dataclass(frozen=True)
class Voice:
    """A speaker of the formant synthesis."""

    pitch: float  # Hz
    tract: float  # formants are higher by this factor the shorter the vocal tract
    tempo: float  # durations are longer by this factor
    breath: float  # noise in vowels

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Voice:
        """Return a man, a woman or a child, drawn from `rng`."""
        tract = rng.uniform(0.92, 1.25)
        pitch = 110 * 2 ** (3 * (tract - 1) + rng.uniform(-0.3, 0.3))
        return cls(pitch, tract, rng.uniform(0.8, 1.0), rng.uniform(0, 0.1))


@dataclass(frozen=True)
class _Phone:
    seconds: float
    voiced: float = 0.0
    noise: float = 0.0
    formants: tuple[float, float, float] = (500.0, 1500.0, 2500.0)  # Hz, of the pulses
    band: tuple[float, float] = (3000.0, 2000.0)  # Hz, centre and width of the noise


_PHONES = {
    "i": _Phone(0.10, 1, 0, (270, 2290, 3010)),
    "I": _Phone(0.08, 1, 0, (390, 1990, 2550)),
    "E": _Phone(0.09, 1, 0, (530, 1840, 2480)),
    "e": _Phone(0.10, 1, 0, (450, 2050, 2600)),
    "a": _Phone(0.12, 1, 0, (730, 1090, 2440)),
    "A": _Phone(0.09, 1, 0, (640, 1190, 2390)),
    "O": _Phone(0.10, 1, 0, (570, 840, 2410)),
    "u": _Phone(0.10, 1, 0, (300, 870, 2240)),
    "w": _Phone(0.06, 0.7, 0, (300, 610, 2200)),
    "r": _Phone(0.07, 0.8, 0, (310, 1060, 1380)),
    "n": _Phone(0.08, 0.4, 0, (250, 1700, 2600)),
    "v": _Phone(0.06, 0.4, 0.1, (280, 1100, 2300), (4000, 3000)),
    "z": _Phone(0.08, 0.3, 0.25, (280, 1700, 2500), (5500, 1000)),
    "s": _Phone(0.10, 0, 0.5, (280, 1700, 2500), (5500, 1000)),
    "f": _Phone(0.09, 0, 0.15, (280, 1100, 2300), (4000, 3000)),
    "T": _Phone(0.09, 0, 0.1, (280, 1400, 2500), (6000, 2500)),
    "-": _Phone(0.05),  # the lips or the tongue are closed
    "t": _Phone(0.03, 0, 0.5, (300, 1700, 2600), (4500, 1500)),
    "k": _Phone(0.03, 0, 0.5, (300, 1900, 2500), (2000, 700)),
}
DIGITS = {
    "ZERO": "zIrOu",
    "ONE": "wAn",
    "TWO": "-tu",
    "THREE": "Tri",
    "FOUR": "fOr",
    "FIVE": "faIv",
    "SIX": "sI-ks",
    "SEVEN": "sEvAn",
    "EIGHT": "eI-t",
    "NINE": "naIn",
}


def speak(word: str, voice: Voice, rng: np.random.Generator, sample_rate: int) -> Sound:
    """Return one of `DIGITS`, at most 0.5 s long, as a voice says it; `rng` draws tempo, pitch and the noise itself."""
    size = round(_FRAME_SECONDS * sample_rate / _HOPS) * _HOPS
    hop = size // _HOPS
    phones = [_PHONES[phone] for phone in DIGITS[word]]
    tempo = voice.tempo * rng.uniform(0.9, 1.1)
    lengths = [max(1, round(phone.seconds * tempo * sample_rate / hop)) for phone in phones]
    tracks = {
        name: _glide(np.repeat([getattr(phone, name) for phone in phones], lengths, axis=0))
        for name in ("voiced", "noise", "formants", "band")
    }
    num_frames = sum(lengths)
    pulses, noise = _sources(num_frames * hop + size, voice, rng, sample_rate)
    hertz = np.fft.rfftfreq(2 * size, 1 / sample_rate)
    loud = tracks["voiced"][:, None]
    sound = _filter(pulses, loud * _resonances(hertz, tracks["formants"] * voice.tract), hop)
    hiss = tracks["noise"][:, None] + voice.breath * loud
    sound += _filter(noise, hiss * _band(hertz, tracks["band"]), hop)
    return np.asarray(0.1 * sound / sound.std(), np.float32)


def _glide(track: _Floats) -> _Floats:
    """The mean over the frames around each: [frames] or [frames, values]."""
    padded = np.pad(track, [(_GLIDE // 2, _GLIDE // 2 - 1)] + [(0, 0)] * (track.ndim - 1), mode="edge")
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, _GLIDE, axis=0).mean(axis=-1))


def _sources(num_samples: int, voice: Voice, rng: np.random.Generator, sample_rate: int) -> tuple[_Floats, _Floats]:
    """Pulses at a pitch that falls towards the end, and noise, both of about unit power."""
    start, end = voice.pitch * rng.uniform(1.0, 1.15), voice.pitch * rng.uniform(0.8, 0.95)
    phase = np.cumsum(np.linspace(start, end, num_samples)) / sample_rate
    pulses = np.diff(np.floor(phase), prepend=0.0) * (sample_rate / voice.pitch) ** 0.5
    return pulses, rng.standard_normal(num_samples)


def _resonances(hertz: _Floats, formants: _Floats) -> _Complex:
    """The vocal tract at every frame, [frames, frequencies], of unit power; the glottis' -6 dB an octave included."""
    response = 1 / (1 + 1j * hertz / 300)
    higher = np.broadcast_to(_HIGHER, (len(formants), len(_HIGHER)))
    for formant, bandwidth in zip(np.hstack([formants, higher]).T, _BANDWIDTHS, strict=True):
        ratio = hertz / formant[:, None]
        response = response / (1 - ratio**2 + 1j * ratio * bandwidth / formant[:, None])
    return np.asarray(response / np.sqrt(np.mean(np.abs(response) ** 2, axis=1, keepdims=True)))


def _band(hertz: _Floats, band: _Floats) -> _Floats:
    """A band of noise at every frame, [frames, frequencies]."""
    return np.exp(-0.5 * ((hertz - band[:, :1]) / band[:, 1:]) ** 2)


def _filter(source: _Floats, response: npt.NDArray[Any], hop: int) -> _Floats:
    """A source through a filter that moves on every `hop` samples (overlapping windows): [frames x hop]."""
    size = _HOPS * hop
    num_frames = len(response)
    windows = np.lib.stride_tricks.sliding_window_view(source, size)[: num_frames * hop : hop]
    pieces = np.fft.irfft(np.fft.rfft(windows * np.hanning(size), 2 * size) * response)
    sound = np.zeros((num_frames + 2 * _HOPS, hop))
    for number in range(2 * _HOPS):
        sound[number : number + num_frames] += pieces[:, number * hop : (number + 1) * hop]
    return sound[:num_frames].ravel()


def _espeak(word: str, speaker: int, rng: np.random.Generator, sample_rate: int) -> Sound:
    """A word of espeak-ng, at most 0.5 s long; the speaker is voice and pitch, `rng` draws the tempo."""
    voice, pitch = f"en+{_VARIANTS[speaker % len(_VARIANTS)]}", 20 + 13 * speaker % 60
    command = ["espeak-ng", "-v", voice, "-p", str(pitch), "-s", str(rng.integers(180, 260)), "--stdout", word.lower()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or len(done.stdout) <= _HEADER_BYTES:
        raise UserError(f"data: espeak-ng fails ({done.stderr.decode().strip()}): mend it, or choose source: formants")
    own_rate = int.from_bytes(done.stdout[24:28], "little")
    sound: _Floats = np.frombuffer(done.stdout[_HEADER_BYTES:], "<i2") / 2**15
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    sound = sound[loud[0] : loud[-1] + 1][: round(_LONGEST_SECONDS * own_rate)]
    sound = _resample(sound, round(len(sound) * sample_rate / own_rate))
    return np.asarray(0.1 * sound / sound.std(), np.float32)


def _resample(sound: _Floats, num_samples: int) -> _Floats:
    """The same sound in so many samples, by a Fourier transform: without what is above half the new rate."""
    return np.fft.irfft(np.fft.rfft(sound)[: num_samples // 2 + 1], num_samples) * (num_samples / len(sound))
