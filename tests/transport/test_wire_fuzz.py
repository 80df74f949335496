from random import Random

import torch
from mutate import mutate_bytes

from isthmus.transport import TransportError
from isthmus.transport.wire import from_buffer, num_bytes, to_buffer

DTYPES = [torch.uint8, torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.int64]


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
