import math

import pytest
import torch

from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core.types import UserError


def cosines(n: int) -> torch.Tensor:
    """The orthonormal DCT-II, entry by entry."""
    rows = [
        [math.cos(math.pi / n * (j + 0.5) * k) * math.sqrt((2 if k else 1) / n) for j in range(n)] for k in range(n)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_identity_27_coefficients_are_the_orthonormal_dct(tile, path):
    c = cosines(tile)
    torch.testing.assert_close(c.T @ c, torch.eye(tile, dtype=torch.float64))
    x = torch.randn(2 * tile, 3 * tile)
    rows = DCT(Cast(), tile).to_rows([x]).view(-1, tile, tile)
    for index, part in enumerate(rows):
        i, j = divmod(index, 3)
        piece = x[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile].double()
        torch.testing.assert_close(part.double(), c @ piece @ c.T, rtol=0, atol=3e-6)
        torch.testing.assert_close(part.square().sum(), piece.square().sum().float())  # Parseval


def test_identity_27_a_constant_tile_is_its_mean_alone(path):
    rows = DCT(Cast(), 16).to_rows([torch.full((16, 16), 3.0)])
    assert rows[0, 0] == pytest.approx(3.0 * 16)
    assert rows[1:].abs().max() < 1e-5


@pytest.mark.parametrize("tile", [8, 64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_identity_27_round_trip_of_any_size_is_exact_to_float32(tile, scale, path):
    shapes = [(67, 131), (64, 64), (8, 8), (1, 1), (), (0,), (97,), (5, 3, 31), (2, 0), (64, 3, 3, 3), (4099,)]
    tensors = [torch.randn(shape) * scale for shape in shapes]
    codec = DCT(Cast(), tile)
    result = codec.from_rows(codec.to_rows(tensors), tensors)
    for x, y in zip(tensors, result, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=0, atol=3e-6 * scale)


def test_sizes_are_padded_not_tiled_by_their_divisors():
    """50,257 is 29 x 1,733: whole tiles and one row of padding, not tiles of 29."""
    codec = DCT(TopK())
    assert len(codec.to_rows([torch.zeros(50257, 64)])) == 786
    assert len(codec.to_rows([torch.zeros(65, 64)])) == 2
    assert len(codec.to_rows([torch.zeros(shape) for shape in (10, 4000, (63, 63), 90)])) == 2


def test_both_paths_and_any_slicing_have_the_same_bits(monkeypatch):
    """The sums are exact, so their order cannot matter: compiled, in torch, tile by tile."""
    tensors = [torch.randn(300, 200) * 10.0 ** torch.randint(-3, 3, (300, 1)), torch.randn(70)]
    codec = DCT(Cast())
    results = []
    for native in ("1", "0"):
        monkeypatch.setenv("ISTHMUS_NATIVE", native)
        rows = codec.to_rows(tensors)
        results.append((rows.clone(), *codec.from_rows(rows, tensors)))
    monkeypatch.setattr("isthmus.compress.base._SLICE_VALUES", 1)
    rows = codec.to_rows(tensors)
    results.append((rows.clone(), *codec.from_rows(rows, tensors)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_spoil_their_tile_only(value, path):
    x = torch.randn(16, 8)
    x[9, 3] = value
    codec = DCT(Cast(), 8)
    (y,) = codec.from_rows(codec.to_rows([x]), [x])
    assert y[:8].isfinite().all()
    assert not y[8:].isfinite().any()


@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": Cast(), "tile": 65},
        {"codec": Cast(), "tile": 12},
        {"codec": TopK(), "tile": 32},
        {"codec": Quantize(8, block=96), "tile": 64},
        {"codec": LowRank(2)},
        {"codec": DCT(Cast())},
    ],
)
def test_bad_arguments_are_one_clear_line(arguments):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        DCT(**arguments)
