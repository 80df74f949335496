"""Streamed speech, from real Parquet files with FLAC in them; `test_streamed_rows` has what images share with it."""

from functools import partial

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data import open_batches
from isthmus.data.speech import Speech
from isthmus.data.speech_samples import VOCABULARY
from isthmus.data.streamed_rows import RowBatches
from tests.data import speech_tables
from tests.data.speech_tables import RATE, ROWS, SIZE, flac, numbers, said, text_of, tone

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that there are many."""
    monkeypatch.setattr("isthmus.data.streamed_rows.BLOCK_ROWS", 8)


@pytest.fixture
def write(tmp_path):
    return partial(speech_tables.write, tmp_path)


def open_data_set(path: str, **options):
    return Speech(path, streaming=True, **{"validation_fraction": 0.1, **options}).open(RATE, SIZE)


def long(number: int) -> dict:
    return {"audio": flac(np.tile(tone(number), 3))}


def test_workers_hear_disjoint_recordings_with_their_texts_and_together_all(write):
    path = write()
    data_set, on_disk = open_data_set(path), Speech(path).open(RATE, SIZE).train
    assert data_set.sizes == {"vocab_size": len(VOCABULARY)}
    sounds = on_disk.read(np.arange(len(on_disk)), None)
    known = dict(zip(numbers(sounds), sounds["audio"], strict=True))
    held_out = data_set.validation(3)
    assert [numbers(batch) for batch in held_out] == [[0, 10, 20], [30]]
    heard = []
    for worker in range(2):
        stream = open_batches(data_set, 1, 2, worker, 2)
        assert stream.tokens_per_batch == 2
        for batch in stream:
            if stream.state_dict()["epoch"] > 0:
                break
            heard += numbers(batch)
            assert batch["audio"].shape == (2, SIZE)
            assert [text_of(text) for text in batch["text"]] == [said(number) for number in numbers(batch)]
            assert batch["text"].shape[1] == max(len(said(number)) for number in numbers(batch))
            assert all(
                torch.equal(sound, known[number])
                for number, sound in zip(numbers(batch), batch["audio"], strict=True)
                if number in known
            )
        stream.close()
    assert len(known) > 30
    assert sorted(heard) == sorted(set(range(ROWS)) - {0, 10, 20, 30})


def test_parts_of_long_recordings_follow_from_the_position(write):
    path = write({number: long(number) for number in range(ROWS)})
    stream = open_batches(open_data_set(path, transcripts=False), 0, 36, 0, 1)
    first = next(stream)
    assert set(first) == {"audio", "length"}
    assert first["length"].tolist() == [SIZE] * 36
    state, second = stream.state_dict(), next(stream)
    resumed = open_batches(open_data_set(path, transcripts=False), 0, 36, 0, 1)
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed)["audio"], second["audio"])
    parts = {sound.numpy().tobytes() for batch in (first, second) for sound in batch["audio"]}
    assert len(parts) == 72, "every epoch another part"
    for each in (stream, resumed):
        each.close()


def test_recordings_too_long_for_their_texts_are_passed_over_and_counted(write, caplog):
    longer = (5, 6, 7, 23)
    stream = RowBatches(open_data_set(write({number: long(number) for number in longer})), 0, 32, 0, 1)
    for _ in range(2):  # in the second epoch they are known
        assert sorted(numbers(next(stream))) == sorted(set(range(ROWS)) - {0, 10, 20, 30, *longer})
    told = caplog.messages
    assert len(told) == 3
    assert f"is longer than {SIZE} samples and passed over, as its transcript would not fit: 1 so far" in told[0]
    assert "'row 23 of shard 0" in told[2]
    assert told[2].endswith("4 so far")


def test_what_cannot_be_heard_or_has_no_text_is_named_and_passed_over(write, caplog):
    cut = flac(tone(11))
    cut["bytes"] = cut["bytes"][:-500]
    bad = {3: {"audio": {"bytes": b"no sound", "path": None}}, 8: {"text": " "}, 9: {"audio": None}, 11: {"audio": cut}}
    path = write(bad)
    batch = next(RowBatches(open_data_set(path), 0, 32, 0, 1))
    assert sorted(numbers(batch)) == sorted(set(range(ROWS)) - {0, 10, 20, 30, *bad})
    told = caplog.text
    assert "'row 8 of shard 0 of" in told
    assert "(it has no transcript): it is passed over" in told
    assert "(it holds no file): it is passed over" in told
    assert all(f"'row {number} of shard 0 of {path}' cannot be read" in told for number in bad)
    with pytest.raises(UserError, match="the bad sample number 4: mend the data, or raise max_bad_samples"):
        next(RowBatches(open_data_set(path, max_bad_samples=3), 0, 32, 0, 1))


def test_bad_input_is_one_line(write):
    path = write()
    for match, options in {
        "has no column 'sound', its columns are audio, text: set data.audio_column": {"audio_column": "sound"},
        "column 'text' of .* does not hold sound: set data.audio_column": {"audio_column": "text"},
        "has no column 'sentence'.*: set data.text_column": {"text_column": "sentence"},
    }.items():
        with pytest.raises(UserError, match=match):
            open_data_set(path, **options)
    slow = write({7: {"audio": flac(tone(7), 8000)}}, "slow")
    match = "'row 7 of shard 0 of .*' has 8000 samples a second, the model 16000: resample"
    with pytest.raises(UserError, match=match):
        next(RowBatches(open_data_set(slow), 0, 32, 0, 1))
