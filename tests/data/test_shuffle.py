"""The shuffled order: a permutation, any part of it alone, the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data.shuffle import derive, permute


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.text(max_size=20))
def test_it_is_a_permutation(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.data())
def test_any_part_can_be_read_alone(size, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    whole = permute(np.array(positions, dtype=np.int64), size, "a")
    assert len(set(whole.tolist())) == len(positions)
    assert all(0 <= value < size for value in whole)
    for position, value in zip(positions, whole, strict=True):
        assert permute(np.array([position]), size, "a") == [value]


def test_the_order_never_changes():
    """A run that is resumed with a later version of this house, or of numpy, must find its samples where they were."""
    assert permute(np.arange(10), 10, "0/0").tolist() == [8, 7, 9, 1, 0, 6, 5, 3, 2, 4]
    far = permute(np.array([0, 1, 10**15]), 10**16, "5/2")
    assert far.tolist() == [3363920340834732, 9314075734376460, 5347750257957353]
    assert derive(1000, "0/0/offset") == 306


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_every_value_is_as_likely_everywhere(size):
    """Over many keys, each of 7 bands of values comes as often at each of 7 bands of positions."""
    keys = 2000
    orders = np.stack([permute(np.arange(7) * size // 7, size, str(key)) for key in range(keys)])  # [keys, 7]
    bands = orders * 7 // size
    counts = np.stack([np.bincount(column, minlength=7) for column in bands.T])
    expected = keys * np.bincount(np.arange(size) * 7 // size, minlength=7) / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 80  # 42 degrees of freedom: 36 to 42 expected, above 80 once in 3000 tries; the keys are fixed


def test_neighbours_are_torn_apart():
    order = permute(np.arange(100_000), 100_000, "a")
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02
    assert (np.abs(np.diff(order)) < 100).mean() < 0.004  # 0.002 by chance
