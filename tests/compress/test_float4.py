import pytest
import torch

from isthmus.compress.float4 import Float4
from isthmus.core.types import UserError

MAGNITUDES = {"E3M0": [0, *(2.0**-k for k in range(7))], "E2M1": [m / 6 for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]}


def decoded(codec: Float4, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows))


@pytest.mark.parametrize("format_", ["E3M0", "E2M1"])
def test_identity_25_values_go_to_the_nearest_level(format_, path):
    rows = torch.randn(100, 64)
    scale = rows.abs().amax(1, keepdim=True)
    levels = torch.tensor(MAGNITUDES[format_])
    distances = (rows.abs()[:, :, None] - levels * scale[:, :, None]).abs()
    result = decoded(Float4(format_, 64, scale_bits=32), rows)
    torch.testing.assert_close((result - rows).abs(), distances.amin(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale_bits", [16, 32])
def test_identity_25_e3m0_relative_error_sign_and_zero(scale_bits, path):
    rows = torch.randn(500, 64) * 10.0 ** torch.randint(-6, 4, (500, 1))
    rows[:, 7] = 0
    result = decoded(Float4("E3M0", 64, scale_bits), rows)
    smallest = rows.abs().amax(1, keepdim=True) / 64 * (1 + 2**-7)
    within = rows.abs() >= smallest
    assert ((result - rows).abs()[within] <= rows.abs()[within] / 3 * (1 + 1e-4)).all()
    assert (result.sign() == rows.sign())[within].all()
    assert not result[:, 7].any()


@pytest.mark.parametrize("format_", ["E3M0", "E2M1"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scale_bits", [8, 16, 32])
def test_a_block_that_is_not_finite_decodes_to_one_that_is_not(format_, value, scale_bits, path):
    rows = torch.randn(4, 32)
    rows[1, 5] = value
    result = decoded(Float4(format_, 32, scale_bits), rows)
    assert not result[1].isfinite().any()
    assert result[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("arguments", [{"format": "E4M3"}, {"block": 3}, {"scale_bits": 4}])
def test_bad_arguments_are_one_clear_line(arguments):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        Float4(**arguments)
