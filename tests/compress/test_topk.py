import pytest
import torch

from isthmus.compress.cast import Cast
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core.types import UserError


def decoded(codec: TopK, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows))


@pytest.mark.parametrize(("keep", "chunk"), [(64, 4096), (1, 50), (7, 100), (33, 64), (37, 37)])
def test_identity_28_keeps_the_largest_like_the_naive_version(keep, chunk, path):
    rows = torch.randn(20, chunk)
    result = decoded(TopK(keep, chunk, Cast()), rows)
    for row, kept in zip(rows, result, strict=True):
        largest = sorted(range(chunk), key=lambda i: -abs(float(row[i])))[:keep]
        naive = torch.zeros(chunk)
        naive[largest] = row[largest]
        assert torch.equal(kept, naive)
    assert ((rows - result).square().sum(1) <= (1 - keep / chunk) * rows.square().sum(1) * (1 + 1e-6)).all()
    assert torch.equal(decoded(TopK(keep, chunk, Cast()), result), result)


def test_the_mean_of_messages_is_that_of_what_each_decodes_to(path):
    codec, weights = TopK(), [0.5, 0.3, 0.2]
    messages = [codec.encode(torch.randn(3, 4096)) for _ in weights]
    expected = sum(codec.decode(message) * weight for message, weight in zip(messages, weights, strict=True))
    assert torch.equal(codec.decode_mean(messages, weights), expected)


@pytest.mark.parametrize("keep", [1, 5, 16])
def test_identity_28_of_equal_magnitudes_exactly_the_first(keep, path):
    rows = torch.ones(3, 16)
    rows[1, ::2] = -1
    rows[2] = torch.tensor([2.0, 1, 1, 3] * 4)
    result = decoded(TopK(keep, 16, Cast()), rows)
    assert ((result != 0).sum(1) == keep).all()
    assert torch.equal(result[:2, :keep], rows[:2, :keep])
    order = [*range(3, 16, 4), *range(0, 16, 4), 1, 2, 5, 6, 9, 10, 13, 14]
    assert result[2].nonzero()[:, 0].tolist() == sorted(order[:keep])


def test_identity_33_bytes_of_the_default(path):
    """10 bits for each of 64 values and one byte of scale: 81 bytes per 4,096 values."""
    codec = TopK()
    assert codec.row_bytes == 64 * (8 + 2) // 8 + 1 == 81
    assert codec.encode(torch.randn(3, 4096)).shape == (3, 81)
    # fp32 DiLoCo with 4 workers sends 2 * 3/4 * 4 bytes a value in two shots; top-k gathers 3 messages
    assert (2 * 3 / 4 * 4) * 4096 / (3 * 81) > 100


def test_values_that_are_not_finite_are_always_sent(path):
    rows = torch.randn(3, 64) * 1e30
    rows[0, 9], rows[1, 60], rows[2, 0] = torch.nan, torch.inf, -torch.inf
    result = decoded(TopK(1, 64, Cast()), rows)
    assert [row.nonzero()[0].item() for row in result] == [9, 60, 0]
    assert not result.isfinite().all(dim=1).any()


def test_a_corrupt_message_decodes_to_nan(path):
    payload = TopK().encode(torch.randn(2, 4096))
    payload[1, 48:64] = 0
    result = TopK().decode(payload)
    assert result[0].isfinite().all()
    assert result[1].isnan().sum() == 64


@pytest.mark.parametrize(
    "arguments",
    [{"keep": 0}, {"keep": 5, "chunk": 4}, {"keep": 32}, {"values": Quantize(8, block=48)}, {"values": LowRank(1)}],
)
def test_bad_arguments_are_one_clear_line(arguments):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        TopK(**arguments)
