import pytest
import torch

from isthmus.compress.packing import decode_scale, encode_scale

SCALES = torch.cat(
    [(0.1 + torch.rand(2000)) * 10.0 ** torch.randint(-12, 5, (2000,)), torch.tensor([1.0, 2.0**-43, 2.0**19])]
)


@pytest.mark.parametrize(("bits", "step"), [(8, 0.25), (16, 2.0**-7), (32, 0.0)])
def test_rounded_up_no_value_exceeds_the_scale(bits, step):
    scale = SCALES[:, None]
    code = encode_scale(scale, bits)
    assert code.shape == (len(scale), bits // 8)
    decoded = decode_scale(code)
    assert (decoded >= scale).all()
    assert (decoded <= scale * (1 + step)).all()
    assert torch.equal(encode_scale(decoded, bits), code)


def test_eight_bits_are_six_of_exponent_and_two_of_mantissa():
    codes = torch.arange(1, 255, dtype=torch.uint8)[:, None]
    expected = [2.0 ** ((code >> 2) - 44) * (1 + (code & 3) / 4) for code in range(1, 255)]
    assert decode_scale(codes)[:, 0].tolist() == expected
    assert torch.equal(encode_scale(decode_scale(codes), 8), codes)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_zero_is_zero_and_what_is_not_finite_stays_so(bits):
    special = torch.tensor([[0.0], [1e-40], [torch.inf], [torch.nan], [3.4e38]])
    decoded = decode_scale(encode_scale(special, bits))[:, 0]
    assert decoded[:2].tolist() == [0.0, 0.0]
    assert not decoded[2:4].isfinite().any()
    assert not decoded[4] < 3.4e38
