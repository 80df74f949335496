"""Spoken digits made on the spot: many speakers, no two recordings alike, words that can be told apart."""

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data.speech import Speech
from isthmus.data.spoken_digits import DIGITS, Voice, has_espeak, speak

RATE = 16_000


def data_set(source: str = "formants", num_samples: int = RATE, **options):
    return Speech(source, **options).open(RATE, num_samples)


def spectrum(sound: np.ndarray) -> np.ndarray:
    """Log energies in 20 bands of 8 stretches of a word."""
    parts = np.array_split(sound, 8)
    bands = [np.array_split(np.abs(np.fft.rfft(part, 2048))[20:700] ** 2, 20) for part in parts]
    energies = np.log(np.array([[band.mean() for band in row] for row in bands]) + 1e-9)
    return (energies - energies.mean()).ravel()


def said_by(speakers) -> dict[str, list[np.ndarray]]:
    voices = [Voice.draw(np.random.default_rng(speaker)) for speaker in speakers]
    return {
        word: [spectrum(speak(word, voice, np.random.default_rng(number), RATE)) for number, voice in enumerate(voices)]
        for word in DIGITS
    }


def test_words_of_unknown_speakers_can_be_told_apart():
    """By the nearest of ten means over other speakers: four of five are understood, where chance is one of ten."""
    means = {word: np.mean(spectra, axis=0) for word, spectra in said_by(range(12)).items()}
    right = [
        min(means, key=lambda known: np.linalg.norm(means[known] - spectrum)) == word
        for word, spectra in said_by(range(12, 20)).items()
        for spectrum in spectra
    ]
    assert np.mean(right) > 0.8


@pytest.mark.parametrize("rate", [4000, 8000, 16_000])
def test_words_are_at_most_half_a_second_and_finite(rate):
    for speaker in range(20):
        for word in DIGITS:
            rng = np.random.default_rng(speaker)
            sound = speak(word, Voice.draw(rng), rng, rate)
            assert rate // 8 < len(sound) <= rate // 2
            assert np.isfinite(sound).all()
            assert sound.std() == pytest.approx(0.1, rel=1e-3)


def test_higher_voices_have_higher_pitch():
    """The strongest period of a vowel is the voice's."""
    for pitch in (100.0, 200.0):
        sound = speak("ONE", Voice(pitch, 1.0, 1.0, 0.0), np.random.default_rng(0), RATE)[1600:4000]
        correlation = np.correlate(sound, sound, "full")[len(sound) - 1 :]
        period = 50 + np.argmax(correlation[50:250])
        assert RATE / period == pytest.approx(pitch, rel=0.2)


def test_a_recording_is_the_same_for_the_same_seed_and_varies_with_it():
    first, again = data_set().train, data_set().train
    indices = np.arange(6)
    one, same, other = (
        source.read(indices, np.array(seeds))
        for source, seeds in ((first, [1] * 6), (again, [1] * 6), (first, [2] * 6))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert torch.equal(one["text"], other["text"])
    for row in range(6):
        assert not torch.equal(one["audio"][row], other["audio"][row])


def test_speakers_are_on_one_side_and_recordings_fit():
    opened = data_set(validation_fraction=0.2)
    assert len(opened.train) + len(opened.held_out) == 2000
    assert 100 <= len(opened.held_out) <= 800
    batch = opened.held_out.read(np.arange(50), None)
    assert set(batch["length"].tolist()) == {RATE // 2, RATE}
    assert opened.sizes == {"vocab_size": 32}
    assert set(data_set(transcripts=False).train.read(np.arange(1), None)) == {"audio", "length"}


def test_longer_recordings_hold_more_words():
    text = data_set(num_samples=4 * RATE).train.read(np.arange(30), None)["text"]
    num_words = (text == 4).sum(dim=1) + 1
    assert set(num_words.tolist()) == {4, 5, 6, 7, 8}


def test_who_speaks_is_said(caplog, monkeypatch):
    caplog.set_level("INFO")
    data_set()
    assert caplog.messages == ["data: spoken digits by formant synthesis"]
    monkeypatch.setenv("PATH", "")  # nothing is installed
    data_set("made")
    assert caplog.messages == ["data: spoken digits by formant synthesis"] * 2
    with pytest.raises(UserError, match="espeak-ng is not installed"):
        data_set("espeak")


def test_what_leaves_no_room_for_a_word_is_refused():
    with pytest.raises(UserError, match="a spoken digit takes 8000 samples, the model has 7999"):
        data_set(num_samples=7999)
    with pytest.raises(UserError, match="need 4000 samples a second"):
        Speech("formants").open(3999, RATE)


@pytest.mark.skipif(not has_espeak(), reason="espeak-ng is not installed")
def test_espeak_speaks(caplog):
    caplog.set_level("INFO")
    opened = data_set("espeak")
    assert caplog.messages == ["data: spoken digits by espeak-ng"]
    batch = opened.train.read(np.arange(4), None)
    assert set(batch["length"].tolist()) <= {RATE // 2, RATE}
    for audio, length in zip(batch["audio"], batch["length"].tolist(), strict=True):
        assert audio[:length].var(correction=0) == pytest.approx(1, abs=1e-3)
    assert data_set("made").sample_order().fingerprint == opened.sample_order().fingerprint
