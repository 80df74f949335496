import math

import hypothesis
import pytest
import torch
from hypothesis import strategies

from isthmus.compress.packing import (
    from_bytes,
    low_bits,
    pack_bits,
    pack_sorted,
    packed_bytes,
    sorted_bytes,
    to_bytes,
    unpack_bits,
    unpack_sorted,
)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8, 11, 16])
@pytest.mark.parametrize("count", [1, 2, 7, 64, 129])
def test_packing_is_undone_and_takes_the_bytes_it_says(bits, count):
    values = torch.randint(0, 2**bits, (5, count))
    packed = pack_bits(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, packed_bytes(count, bits))
    assert torch.equal(unpack_bits(packed, bits, count).long(), values)
    if count * bits % 8 == 0 and count % 8 == 0:
        assert packed_bytes(count, bits) == count * bits // 8


def test_layout_of_four_bits_is_halves():
    assert pack_bits(torch.tensor([[1, 2, 3, 4]]), 4).tolist() == [[1 + 3 * 16, 2 + 4 * 16]]


def test_bytes_at_any_address():
    data = to_bytes(torch.tensor([[1.5, -2.0]]), torch.float32)
    shifted = torch.cat([torch.zeros(1, 1, dtype=torch.uint8), data], dim=1)[:, 1:]
    assert from_bytes(shifted, torch.float32).tolist() == [[1.5, -2.0]]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(strategies.data())
def test_elias_fano_is_undone_for_any_sorted_indices(data):
    of = data.draw(strategies.integers(1, 300))
    keep = data.draw(strategies.integers(1, of))
    rows = [sorted(data.draw(strategies.permutations(range(of)))[:keep]) for _ in range(2)]
    packed = pack_sorted(torch.tensor(rows), of)
    assert packed.shape == (2, sorted_bytes(keep, of))
    indices, valid = unpack_sorted(packed, keep, of)
    assert indices.tolist() == rows
    assert valid.all()


def test_identity_33_elias_fano_of_64_in_4096_takes_8_bits_an_index():
    assert low_bits(64, 4096) == 6
    assert sorted_bytes(64, 4096) == 64
    entropy = (math.lgamma(4097) - math.lgamma(65) - math.lgamma(4033)) / math.log(2) / 64
    assert entropy == pytest.approx(7.36, abs=0.01)


@pytest.mark.parametrize(("keep", "of"), [(64, 4096), (5, 37), (16, 16), (1, 100)])
def test_corrupt_bytes_are_found_and_never_lead_out_of_the_row(keep, of):
    good = pack_sorted(torch.stack([torch.randperm(of)[:keep].sort().values for _ in range(200)]), of)
    corrupt = good ^ (torch.rand(good.shape) < 0.05).to(torch.uint8) * torch.randint_like(good, 256)
    corrupt[0], corrupt[1] = 0, 255
    indices, valid = unpack_sorted(corrupt, keep, of)
    assert (indices >= 0).all()
    assert (indices < of).all()
    assert (indices.diff(dim=1) > 0).all()
    assert not valid[0]
    accepted = valid[:, 0]  # what is accepted is some other, sound message
    assert torch.equal(unpack_sorted(pack_sorted(indices[accepted], of), keep, of)[0], indices[accepted])
