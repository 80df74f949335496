"""Whether values are finite, over several tensors at once."""

import math

import pytest
import torch

from isthmus.compress.base import is_finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_one_value_in_any_tensor_counts(place: int, value: float) -> None:
    tensors = [torch.randn(3, 4), torch.empty(0), torch.randn(5)]
    assert is_finite(*tensors)
    tensors[place].view(-1)[1] = value
    assert not is_finite(*tensors)


def test_where_there_are_no_values_all_are_finite() -> None:
    assert is_finite()
    assert is_finite(torch.empty(0))
