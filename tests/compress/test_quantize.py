import pytest
import torch

from isthmus.compress.quantize import Quantize
from isthmus.core.types import UserError

HALF = {8: 127.0, 4: 7.0, 2: 1.5}


def decoded(codec: Quantize, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(rows, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale_bits", [8, 16, 32])
def test_identity_23_error_is_at_most_half_a_step(bits, scale_bits, path):
    rows = torch.randn(200, 64)
    step = rows.abs().amax(1, keepdim=True) / HALF[bits] * {8: 1.25, 16: 1 + 2**-7, 32: 1}[scale_bits]
    error = (decoded(Quantize(bits, 64, scale_bits=scale_bits), rows) - rows).abs()
    assert (error <= step / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize(("bits", "share"), [(8, 1.0), (4, 1.0), (2, 0.75)])
@pytest.mark.parametrize("value", [3.0, -0.5, 2.0**-20, 0.0])
def test_identity_23_constant_blocks_return_exactly(bits, share, value, path):
    """2 bits send three quarters of it: what is left is the next round's."""
    rows = torch.full((3, 32), value)
    assert torch.equal(decoded(Quantize(bits, 32), rows), rows * share)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scale_bits", [8, 16, 32])
def test_a_block_that_is_not_finite_decodes_to_one_that_is_not(bits, value, rounding, scale_bits, path):
    rows = torch.randn(4, 32)
    rows[1, 5] = value
    result = decoded(Quantize(bits, 32, rounding, scale_bits), rows)
    assert not result[1].isfinite().any()
    assert result[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_identity_24_stochastic_rounding_is_unbiased_and_within_a_step(bits):
    codec = Quantize(bits, 32, "stochastic", scale_bits=32)
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))  # the first is not the largest of its block
    step = rows.abs().amax(1, keepdim=True) / HALF[bits]
    draws = torch.stack([decoded(codec, rows, seed) for seed in range(1500)])
    assert ((draws - rows).abs() < step * (1 + 1e-4)).all()
    deviation = step / 2 / 1500**0.5  # at most, per value
    assert ((draws.mean(0) - rows).abs() < 5 * deviation).all()
    assert len(draws[:, 0, 0].unique()) == 2


@pytest.mark.parametrize("scale_bits", [16, 32])
def test_two_bits_are_wrong_by_at_most_a_quarter_of_the_largest(scale_bits, path):
    rows = torch.distributions.StudentT(3.0).sample((500, 64))
    largest = rows.abs().amax(1, keepdim=True)
    error = (decoded(Quantize(2, 64, scale_bits=scale_bits), rows) - rows).abs()
    assert (error <= largest / 4 * (1.01 if scale_bits == 16 else 1.00001)).all()
    assert error.max() > largest.min() / 5


@pytest.mark.parametrize("kind", ["gauss", "student-t"])
def test_two_bits_keep_the_residual_of_error_feedback_small(kind, path):
    """Below a third of the largest gradient in every block, also when the gradient stays the same for ever."""
    gradient = torch.randn(100, 64) if kind == "gauss" else torch.distributions.StudentT(3.0).sample((100, 64))
    bound = gradient.abs().amax(1, keepdim=True) / 3 * 1.02
    residual, sent = torch.zeros(100, 64), torch.zeros(100, 64)
    for _ in range(100):
        message = decoded(Quantize(2, 64), residual + gradient)
        residual, sent = residual + gradient - message, sent + message
        assert (residual.abs() <= bound).all()
    assert ((sent / 100 - gradient).abs() <= bound / 100 * 1.01).all()


@pytest.mark.parametrize("arguments", [{"bits": 3}, {"block": 0}, {"bits": 2, "block": 6}, {"scale_bits": 12}])
def test_bad_arguments_are_one_clear_line(arguments):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        Quantize(**arguments)
    with pytest.raises(UserError, match="rounding"):
        Quantize(rounding="up")
