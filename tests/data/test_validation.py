"""What is held out: by names that may come and go, by numbers, by what the data themselves keep for validation."""

import numpy as np
import pytest

from isthmus.data.text import Text
from isthmus.data.validation import held_out_names, held_out_rows, own_parts, rows_between_held_out


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_names_that_come_leave_the_others_where_they_are(fraction):
    names = [f"file {number}" for number in range(300)]
    few, many = held_out_names(names[:200], fraction), held_out_names(names, fraction)
    assert 0 < len(few) < 200
    assert abs(len(many) / 300 - fraction) < 0.1
    assert few <= many | {min(names[:200], key=lambda name: name in many)}


def test_rows_are_held_out_by_their_number_alone():
    assert held_out_rows(20, 0.2).tolist() == held_out_rows(20, 0.2).tolist()
    assert [len(held_out_rows(size, 0.1)) for size in (2, 10, 99, 1000)] == [1, 1, 10, 100]
    assert len(held_out_rows(3, 0.99)) == 2
    assert [rows_between_held_out(fraction) for fraction in (0.01, 0.1, 0.9)] == [100, 10, 2]


@pytest.mark.parametrize("name", ["validation", "val"])
def test_a_folder_with_parts_of_its_own_is_split_by_them(tmp_path, name):
    for part, values in (("train", b"ab"), (name, b"cd"), ("test", b"ef")):
        (tmp_path / part).mkdir()
        for value in values:
            (tmp_path / part / f"{value}.txt").write_bytes(bytes([value]) * 20)
    assert own_parts(tmp_path) == ("train", name)
    data_set = Text(str(tmp_path)).open(sequence_length=4)
    assert set(np.asarray(data_set.train)) == set(b"ab\0")
    assert set(np.asarray(data_set.held_out)) == set(b"cd\0")
    (tmp_path / "train").rename(tmp_path / "training")
    assert own_parts(tmp_path) is None
