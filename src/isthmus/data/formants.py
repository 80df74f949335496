"""Spoken digits made of formants: a source (pulses, noise) through a filter (the vocal tract's resonances).

Vowel formants: Peterson and Barney, "Control Methods Used in a Study of the Vowels", 1952 (men). The model: Fant,
"Acoustic Theory of Speech Production", 1960. Nobody would take it for a person; the digits can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Sound = npt.NDArray[np.float32]  # [num_samples]

_FRAME_SECONDS, _HOPS = 0.02, 4  # the filter moves on every 5 ms
_BANDWIDTHS = (60.0, 90.0, 150.0, 200.0, 250.0)  # Hz
_HIGHER = (3500.0, 4500.0)  # formants above the third hardly move
_GLIDE = 8  # frames over which one sound becomes the next


@dataclass(frozen=True)
class Voice:
    """Who speaks."""

    pitch: float  # Hz
    tract: float  # formants are higher by this factor the shorter the vocal tract
    tempo: float  # durations are longer by this factor
    breath: float  # noise in vowels

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Voice:
        """A man, a woman or a child, drawn from `rng`."""
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
    """A digit, at most 0.5 s long, as this voice says it this time.

    Args:
        word: one of `DIGITS`.
        voice: who speaks.
        rng: draws what differs from time to time: tempo, pitch, the noise itself.
        sample_rate: in Hz.
    """
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
    return (0.1 * sound / sound.std()).astype(np.float32)


def _glide(track: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean over the frames around each: [frames] or [frames, values]."""
    padded = np.pad(track, [(_GLIDE // 2, _GLIDE // 2 - 1)] + [(0, 0)] * (track.ndim - 1), mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, _GLIDE, axis=0).mean(axis=-1)


def _sources(
    num_samples: int, voice: Voice, rng: np.random.Generator, sample_rate: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Pulses at a pitch that falls towards the end, and noise, both of about unit power."""
    start, end = voice.pitch * rng.uniform(1.0, 1.15), voice.pitch * rng.uniform(0.8, 0.95)
    phase = np.cumsum(np.linspace(start, end, num_samples)) / sample_rate
    pulses = np.diff(np.floor(phase), prepend=0.0) * (sample_rate / voice.pitch) ** 0.5
    return pulses, rng.standard_normal(num_samples)


def _resonances(hertz: npt.NDArray[np.float64], formants: npt.NDArray[np.float64]) -> npt.NDArray[np.complex128]:
    """The vocal tract at every frame, [frames, frequencies], of unit power; the glottis' -6 dB an octave included."""
    response = 1 / (1 + 1j * hertz / 300)
    higher = np.broadcast_to(_HIGHER, (len(formants), len(_HIGHER)))
    for formant, bandwidth in zip(np.hstack([formants, higher]).T, _BANDWIDTHS, strict=True):
        ratio = hertz / formant[:, None]
        response = response / (1 - ratio**2 + 1j * ratio * bandwidth / formant[:, None])
    return response / np.sqrt(np.mean(np.abs(response) ** 2, axis=1, keepdims=True))


def _band(hertz: npt.NDArray[np.float64], band: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A band of noise at every frame, [frames, frequencies]."""
    return np.exp(-0.5 * ((hertz - band[:, :1]) / band[:, 1:]) ** 2)


def _filter(source: npt.NDArray[np.float64], response: npt.NDArray[Any], hop: int) -> npt.NDArray[np.float64]:
    """A source through a filter that moves on every `hop` samples (overlapping windows): [frames x hop]."""
    size = _HOPS * hop
    num_frames = len(response)
    windows = np.lib.stride_tricks.sliding_window_view(source, size)[: num_frames * hop : hop]
    pieces = np.fft.irfft(np.fft.rfft(windows * np.hanning(size), 2 * size) * response)
    sound = np.zeros((num_frames + 2 * _HOPS, hop))
    for number in range(2 * _HOPS):
        sound[number : number + num_frames] += pieces[:, number * hop : (number + 1) * hop]
    return sound[:num_frames].ravel()
