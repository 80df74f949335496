"""Speech of the `datasets` library, from real Parquet files with FLAC in them."""

from functools import partial

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data import OrderedBatches
from isthmus.data.speech import Speech
from isthmus.data.speech_samples import VOCABULARY, normalised
from tests.data import speech_tables
from tests.data.speech_tables import RATE, ROWS, SIZE, flac, numbers, said, text_of, tone

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def write(tmp_path):
    return partial(speech_tables.write, tmp_path)


def open_rows(path: str, **options):
    return Speech(path, **{"validation_fraction": 0.1, **options}).open(RATE, SIZE)


def test_workers_hear_disjoint_recordings_with_their_texts_and_together_all(write):
    data_set = open_rows(write())
    assert data_set.sizes == {"vocab_size": len(VOCABULARY)}
    streams = [OrderedBatches(data_set.sample_order(seed=1), 3, worker, 2) for worker in range(2)]
    batches = [next(stream) for stream in streams for _ in range(6)]
    held_out = data_set.validation(4)
    heard = [number for batch in [*batches, *held_out] for number in numbers(batch)]
    assert sorted(heard) == list(range(ROWS))
    assert sum(len(batch["length"]) for batch in held_out) == 4
    for batch in batches:
        for number, audio, text in zip(numbers(batch), batch["audio"], batch["text"], strict=True):
            assert text_of(text) == said(number)
            expected = torch.from_numpy(normalised(tone(number)))
            torch.testing.assert_close(audio[: 3000 + number], expected, atol=1e-3, rtol=0)  # 16 bits
            assert not audio[3000 + number :].any()


def test_without_transcripts_a_part_of_a_long_recording_is_heard(write):
    path = write({5: {"audio": flac(np.tile(tone(5), 3)), "text": None}})
    data_set = open_rows(path, transcripts=False)
    assert data_set.sizes == {}
    stream = OrderedBatches(data_set.sample_order(), 36)
    parts = []
    for _ in range(2):
        batch = next(stream)
        assert set(batch) == {"audio", "length"}
        (row,) = [row for row, length in enumerate(batch["length"].tolist()) if length == SIZE]
        parts.append(batch["audio"][row])
    assert not torch.equal(*parts)


def test_what_cannot_be_heard_or_has_no_text_is_named_and_passed_over(write, caplog):
    path = write({3: {"audio": {"bytes": b"no sound", "path": None}}, 8: {"text": " "}, 9: {"audio": None}})
    for _ in range(2):  # the second time the headers are in the cache
        data_set = open_rows(path)
        told = caplog.text
        assert "'row 3 of train' cannot be read" in told
        assert "'row 8 of train' cannot be read (it has no transcript): it is passed over" in told
        assert "'row 9 of train' cannot be read (it holds no file): it is passed over" in told
        heard = numbers(data_set.train.read(np.arange(len(data_set.train)), None)) + numbers(data_set.validation(40)[0])
        assert sorted(heard) == sorted(set(range(ROWS)) - {3, 8, 9})
    with pytest.raises(UserError, match="the bad sample number 3: mend the data, or raise max_bad_samples"):
        open_rows(path, max_bad_samples=2)


def test_recordings_too_long_for_their_texts_are_left_out_and_counted(write, caplog):
    data_set = open_rows(write({5: {"audio": flac(np.tile(tone(5), 3))}}))
    assert len(data_set.train) + len(data_set.held_out) == ROWS - 1
    assert f"recordings are longer than {SIZE} samples and left out" in caplog.text


def test_bad_input_is_one_line(write):
    path = write()
    for match, options in {
        "has no column 'sound', its columns are audio, text: set data.audio_column": {"audio_column": "sound"},
        "column 'text' of .* does not hold sound: set data.audio_column": {"audio_column": "text"},
        "has no column 'sentence'.*: set data.text_column": {"text_column": "sentence"},
        "validation_fraction is 2; choose one between 0 and 1": {"validation_fraction": 2},
    }.items():
        with pytest.raises(UserError, match=match):
            open_rows(path, **options)
    slow = write({7: {"audio": flac(tone(7), 8000)}}, "slow")
    with pytest.raises(UserError, match="'row 7 of train' has 8000 samples a second, the model 16000: resample"):
        open_rows(slow)
