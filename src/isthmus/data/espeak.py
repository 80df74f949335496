"""Spoken words by espeak-ng, where it is installed."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.formants import Sound

_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5")
_HEADER_BYTES = 44  # of a WAV file
_LONGEST = 0.5  # seconds


def installed() -> bool:
    """Whether espeak-ng is there."""
    return shutil.which("espeak-ng") is not None


def speak(word: str, speaker: int, rng: np.random.Generator, sample_rate: int) -> Sound:
    """A word, at most 0.5 s long, as this speaker says it this time.

    Args:
        word: any.
        speaker: chooses voice and pitch.
        rng: draws the tempo.
        sample_rate: in Hz; espeak-ng's own 22,050 become these by a Fourier transform.

    Raises:
        UserError: espeak-ng fails.
    """
    voice, pitch = f"en+{_VARIANTS[speaker % len(_VARIANTS)]}", 20 + 13 * speaker % 60
    command = ["espeak-ng", "-v", voice, "-p", str(pitch), "-s", str(rng.integers(180, 260)), "--stdout", word.lower()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or len(done.stdout) <= _HEADER_BYTES:
        raise UserError(f"data: espeak-ng fails ({done.stderr.decode().strip()}): mend it, or choose source: formants")
    own_rate = int.from_bytes(done.stdout[24:28], "little")
    sound = np.frombuffer(done.stdout[_HEADER_BYTES:], "<i2") / 2**15
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    sound = sound[loud[0] : loud[-1] + 1][: round(_LONGEST * own_rate)]
    sound = _resample(sound, round(len(sound) * sample_rate / own_rate))
    return (0.1 * sound / sound.std()).astype(np.float32)


def _resample(sound: np.ndarray, num_samples: int) -> np.ndarray:
    """As many samples of the same sound, without what is above half the new rate."""
    return np.fft.irfft(np.fft.rfft(sound)[: num_samples // 2 + 1], num_samples) * (num_samples / len(sound))
