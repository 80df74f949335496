"""Speech in a folder: FLAC files as LibriSpeech lays them out, and what may be wrong with them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data.speech import Speech
from isthmus.data.speech_samples import VOCABULARY, encode, normalised

soundfile = pytest.importorskip("soundfile")
RATE, SIZE = 16_000, 4000
DIGIT = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def tone(number: int, size: int = 3000) -> np.ndarray:
    """A sound that no other number has."""
    return (0.3 * np.sin(2 * np.pi * (200 + 10 * number) * np.arange(size) / RATE)).astype(np.float32)


def write(path: Path, sound: np.ndarray, text: str | None = None, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound, rate)
    if text is not None:
        path.with_suffix(".txt").write_text(text)
    return path


@pytest.fixture
def librispeech(tmp_path) -> Path:
    """Eight speakers with five recordings each, of 3000 samples and more, one a sample longer than the one before."""
    for speaker in range(8):
        folder = tmp_path / "speech" / str(speaker) / "100"
        names = [f"{speaker}-100-{number:04d}" for number in range(5)]
        for number, name in enumerate(names, 5 * speaker):
            write(folder / f"{name}.flac", tone(number, 3000 + number))
        lines = [f"{name} {DIGIT[speaker]} {DIGIT[number]}\n" for number, name in enumerate(names)]
        (folder / f"{speaker}-100.trans.txt").write_text("".join(lines))
    return tmp_path / "speech"


def open_folder(folder: Path, **options):
    return Speech(str(folder), **options).open(RATE, SIZE)


def everything(source) -> dict[str, torch.Tensor]:
    return source.read(np.arange(len(source)), None)


def spoken(row: torch.Tensor) -> str:
    return "".join(VOCABULARY[number] for number in row.tolist() if number >= 0).replace("|", " ")


def test_what_is_heard_and_what_is_said_belong_together(librispeech):
    data_set = open_folder(librispeech)
    seen = set()
    for source in (data_set.train, data_set.held_out):
        batch = everything(source)
        assert {name: tensor.dtype for name, tensor in batch.items()} == {
            "audio": torch.float32,
            "length": torch.int64,
            "text": torch.int64,
        }
        assert batch["audio"].shape == (len(source), SIZE)
        for audio, length, text in zip(batch["audio"], batch["length"].tolist(), batch["text"], strict=True):
            speaker, take = divmod(length - 3000, 5)
            assert spoken(text) == f"{DIGIT[speaker]} {DIGIT[take]}"
            expected = normalised(tone(length - 3000, length))
            torch.testing.assert_close(audio[:length], torch.from_numpy(expected), rtol=0, atol=1e-3)  # 16 bits
            assert not audio[length:].any()
            seen.add(length)
    assert seen == set(range(3000, 3040))
    assert data_set.sizes == {"vocab_size": 32}


def test_sounds_have_zero_mean_and_unit_variance(librispeech):
    batch = everything(open_folder(librispeech).train)
    for audio, length in zip(batch["audio"], batch["length"].tolist(), strict=True):
        assert audio[:length].mean().abs() < 1e-4
        assert audio[:length].var(correction=0) == pytest.approx(1, abs=1e-3)


def test_no_speaker_is_on_both_sides(librispeech):
    data_set = open_folder(librispeech, validation_fraction=0.3)
    train, held_out = (
        {(length - 3000) // 5 for length in everything(side)["length"].tolist()}
        for side in (data_set.train, data_set.held_out)
    )
    assert train | held_out == set(range(8))
    assert not train & held_out
    assert 1 <= len(held_out) <= 5


def test_texts_beside_files_and_wav_are_read(tmp_path):
    for number, name in enumerate(("a.wav", "b.flac", "c.FLAC")):
        write(tmp_path / name, tone(number), f"It's {number}\n")
    write(tmp_path / ".hidden.wav", tone(3), "no")
    data_set = open_folder(tmp_path)
    texts = sorted(spoken(text) for side in (data_set.train, data_set.held_out) for text in everything(side)["text"])
    assert texts == ["IT'S <unk>"] * 3


def test_several_channels_become_their_mean(tmp_path):
    for number in range(2):
        write(tmp_path / f"{number}.flac", np.stack([tone(number), np.zeros(3000)], axis=1), "one")
    audio = torch.cat([everything(side)["audio"] for side in (lambda c: (c.train, c.held_out))(open_folder(tmp_path))])
    expected = torch.stack([torch.from_numpy(normalised(tone(number))) for number in range(2)])
    found = audio[:, :3000][audio[:, 5].argsort()]
    torch.testing.assert_close(found, expected[expected[:, 5].argsort()], rtol=0, atol=2e-3)


def test_with_transcripts_long_recordings_are_left_out(librispeech, caplog):
    write(librispeech / "0" / "100" / "0-100-0000.flac", tone(0, SIZE + 1))
    data_set = open_folder(librispeech)
    assert len(data_set.train) + len(data_set.held_out) == 39
    assert "1 of 40 recordings are longer than 4000 samples and left out" in caplog.text


def test_without_transcripts_a_part_of_long_recordings_is_heard(tmp_path):
    long = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * SIZE).astype(np.float32)
    for number in range(2):
        write(tmp_path / f"{number}.flac", long)
    data_set = open_folder(tmp_path, transcripts=False)
    assert data_set.sizes == {}
    begin = everything(data_set.held_out)
    assert set(begin) == {"audio", "length"}
    torch.testing.assert_close(begin["audio"][0], torch.from_numpy(normalised(long[:SIZE])), rtol=0, atol=1e-3)
    parts = [data_set.train.read(np.array([0]), np.array([seed]))["audio"][0] for seed in (1, 1, 2)]
    assert torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])
    windows = np.lib.stride_tricks.sliding_window_view(long, SIZE)
    errors = np.abs(windows[:, :50] - windows[:, :50].mean(axis=1, keepdims=True)).sum(axis=1)  # not constant
    assert errors.all()
    scores = windows @ parts[2].numpy() / SIZE
    assert scores.max() == pytest.approx(long.std(), rel=0.05)  # one of its parts, and no other sound


def test_other_files_other_fingerprint(librispeech):
    before = open_folder(librispeech).sample_order().fingerprint
    assert open_folder(librispeech).sample_order().fingerprint == before
    write(librispeech / "0" / "100" / "0-100-0000.flac", tone(0, 2999))
    assert open_folder(librispeech).sample_order().fingerprint != before


def refused(folder: Path, match: str, num_samples: int = SIZE, rate: int = RATE, **options) -> None:
    with pytest.raises(UserError, match=match) as error:
        Speech(str(folder), **options).open(rate, num_samples)
    assert "\n" not in str(error.value)


def test_bad_sources_are_refused(tmp_path, librispeech):
    refused(tmp_path / "nowhere", "is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no FLAC or WAV files")
    refused(librispeech, "16000 samples a second, the model 8000: resample", rate=8000)
    refused(librispeech, "no training samples", num_samples=100)
    refused(librispeech, "validation_fraction is 1", validation_fraction=1.0)
    refused(librispeech, "max_bad_samples is -1", max_bad_samples=-1)


def test_files_that_cannot_be_used_are_named_and_counted_up_to_a_limit(librispeech, caplog):
    folder = librispeech / "0" / "100"
    (folder / "0-100-0000.flac").write_bytes(b"no sound")
    (folder / "0-100-0001.flac").write_bytes(b"")
    write(folder / "0-100-0009.flac", tone(9))
    (folder / "0-100-0010.flac").symlink_to(folder / "nowhere")
    data_set = open_folder(librispeech, max_bad_samples=4)
    assert len(data_set.train) + len(data_set.held_out) == 38
    said = caplog.text
    parts = ("0000.flac' cannot be read (", "0001.flac' cannot", "it has no transcript", "0010.flac' cannot")
    for number, part in enumerate(parts, 1):
        assert part in said
        assert f"passed over, {number} of at most 4\n" in said
    refused(librispeech, r"0010\.flac' cannot be read .*, the bad sample number 4", max_bad_samples=3)
    (folder / "0-100.trans.txt").write_bytes(b"\xff\xfe")
    refused(librispeech, "it is not UTF-8")


def test_in_the_place_of_a_damaged_recording_the_next_one_is_heard(tmp_path, caplog):
    """Its header is whole; that its end is missing shows only when it is read."""
    for number in range(6):
        write(tmp_path / f"{number}.flac", tone(number, 3900), DIGIT[number])
    data_set = open_folder(tmp_path, max_bad_samples=1)
    whole = [spoken(text) for text in everything(data_set.train)["text"]]
    paths = [tmp_path / f"{DIGIT.index(said)}.flac" for said in whole]
    paths[-1].write_bytes(paths[-1].read_bytes()[:-200])
    data_set = open_folder(tmp_path, max_bad_samples=1)
    batch = everything(data_set.train)
    assert [spoken(text) for text in batch["text"]] == [*whole[:-1], whole[0]]
    assert torch.equal(batch["audio"][-1], batch["audio"][0])
    everything(data_set.train)
    assert caplog.text.count("passed over") == 1
    paths[0].write_bytes(paths[0].read_bytes()[:-200])
    with pytest.raises(UserError, match="the bad sample number 2"):
        everything(data_set.train)


def test_the_vocabulary_is_that_of_the_published_models():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 32
    assert encode("AZ 'É") == [7, 31, 4, 27, 3]
