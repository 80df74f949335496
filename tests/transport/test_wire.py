from random import Random

import pytest
import torch
from fuzzing import mutate_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.transport import TransportError
from isthmus.transport.wire import from_buffer, num_bytes, to_buffer

DTYPES = [torch.uint8, torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.int64]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), st.integers(0, 7))
def test_identity_33_round_trip_and_size_to_the_byte(spec, offset):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in spec]
    buffer = to_buffer(tensors)
    assert len(buffer) == num_bytes(tensors) == sum(t.numel() * t.element_size() for t in tensors)
    shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), buffer])[offset:]  # arrives at any offset
    for before, after in zip(tensors, from_buffer(shifted, tensors), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_same_bytes_as_numpy():
    tensors = [torch.arange(3, dtype=torch.int16), torch.tensor(2.5), torch.arange(6.0).view(2, 3).t()]
    expected = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    assert to_buffer(tensors).numpy().tobytes() == expected


@pytest.mark.parametrize(
    "tensor", [torch.arange(12.0)[::2], torch.arange(12, dtype=torch.int16)[1::3], torch.tensor(7.0).expand(4)]
)
def test_strided_tensors_are_packed_without_their_gaps(tensor):
    assert torch.equal(from_buffer(to_buffer([tensor, tensor]), [tensor, tensor])[1], tensor)


def test_unpack_makes_views_and_copies_only_what_is_misaligned():
    like = [torch.zeros(4), torch.zeros(3, dtype=torch.uint8), torch.zeros(2)]
    buffer = to_buffer(like)
    inside = range(buffer.data_ptr(), buffer.data_ptr() + len(buffer))
    assert [tensor.data_ptr() in inside for tensor in from_buffer(buffer, like)] == [True, True, False]


def test_pack_copies():
    tensor = torch.ones(4)
    to_buffer([tensor]).zero_()
    assert tensor.sum() == 4


@pytest.mark.parametrize("size", [0, 15, 17])
def test_wrong_size_is_an_error_that_names_both(size):
    with pytest.raises(TransportError, match=f"{size} bytes came where 16 were expected"):
        from_buffer(torch.zeros(size, dtype=torch.uint8), [torch.zeros(4)])


def test_10000_mutated_buffers_are_refused_or_unpacked_bit_for_bit():
    random = Random(0)
    refused = 0
    for _ in range(10_000):
        like = [
            torch.empty([random.randrange(4) for _ in range(random.randrange(4))], dtype=random.choice(DTYPES))
            for _ in range(random.randrange(1, 5))
        ]
        data = mutate_bytes(random.randbytes(num_bytes(like)) or b"\0", random)[:4096]
        buffer = torch.tensor(list(data), dtype=torch.uint8)
        try:
            tensors = from_buffer(buffer, like)
        except TransportError:
            refused += 1
            assert len(data) != num_bytes(like)
        else:
            assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in like]
            assert torch.equal(to_buffer(tensors), buffer)
    assert 2000 < refused < 9500
