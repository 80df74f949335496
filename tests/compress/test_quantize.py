import itertools

import pytest
import torch

from isthmus.compress.quantize import Quantize
from isthmus.core.types import UserError

HALF = {8: 127.0, 4: 7.0, 2: 1.5}


def decoded(codec: Quantize, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(rows, torch.Generator().manual_seed(seed)))


def samples(kind: str, rows: int, block: int) -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "gauss":
        return torch.randn(rows, block)
    if kind == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample((rows, block))
    if kind == "student-t":
        return torch.distributions.StudentT(3.0).sample((rows, block))
    chunk = torch.randn(rows, 64 * block)  # what top-k keeps of Gaussian chunks
    return chunk.gather(1, chunk.abs().topk(block, dim=1).indices)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale_bits", [8, 16, 32])
def test_identity_23_error_is_at_most_half_a_step(bits, scale_bits, path):
    rows = torch.randn(200, 64)
    step = rows.abs().amax(1, keepdim=True) / HALF[bits] * {8: 1.25, 16: 1 + 2**-7, 32: 1}[scale_bits]
    error = (decoded(Quantize(bits, 64, scale_bits=scale_bits), rows) - rows).abs()
    assert (error <= step / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize(("bits", "value"), list(itertools.product([8, 4, 2], [3.0, -0.5, 2.0**-20, 0.0])))
def test_identity_23_constant_blocks_return_exactly(bits, value, path):
    rows = torch.full((3, 32), value)
    assert torch.equal(decoded(Quantize(bits, 32), rows), rows)


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
    rows = torch.randn(2, 32)
    step = rows.abs().amax(1, keepdim=True) / HALF[bits]
    draws = torch.stack([decoded(codec, rows, seed) for seed in range(1500)])
    assert ((draws - rows).abs() < step * (1 + 1e-4)).all()
    deviation = step / 2 / 1500**0.5  # at most, per value
    assert ((draws.mean(0) - rows).abs() < 5 * deviation).all()
    assert len(draws[:, 0, 0].unique()) == 2


@pytest.mark.parametrize(("kind", "below_absmax"), [("gauss", 2), ("laplace", 3), ("student-t", 5), ("kept", 10)])
@pytest.mark.parametrize("block", [64, 128])
def test_two_bit_scale_is_near_the_best_there_is(kind, below_absmax, block, path):
    """The rule (least squares for the better of two cuts) against a search over scales of every block."""
    rows = samples(kind, 200, block)

    def error(scale: torch.Tensor) -> torch.Tensor:
        level = ((rows / scale * 1.5).floor().clamp(-2, 1) + 0.5) / 1.5
        return ((rows - level * scale) ** 2).sum(1)

    mean = rows.abs().mean(1, keepdim=True)
    best = torch.stack([error(mean * factor) for factor in torch.linspace(0.3, 5, 95)]).amin(0)
    ours = ((rows - decoded(Quantize(2, block), rows)) ** 2).sum(1)
    assert ours.sum() < 1.02 * best.sum()
    assert ours.sum() < error(rows.abs().amax(1, keepdim=True)).sum() / below_absmax
    assert (ours <= (rows**2).sum(1)).all()  # a contraction, block by block: error feedback converges


@pytest.mark.parametrize("arguments", [{"bits": 3}, {"block": 0}, {"bits": 2, "block": 6}, {"scale_bits": 12}])
def test_bad_arguments_are_one_clear_line(arguments):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        Quantize(**arguments)
    with pytest.raises(UserError, match="rounding"):
        Quantize(rounding="up")
