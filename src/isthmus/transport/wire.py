"""Lists of tensors as one buffer of bytes, and back, without headers: both sides know shapes and dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from isthmus.core.types import Tensors
from isthmus.transport.base import TransportError

_MAX_OBJECT_BYTES = 1 << 26


def num_bytes(tensors: Tensors) -> int:
    """Return the bytes that tensors take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def to_buffer(tensors: Tensors) -> torch.Tensor:
    """Copy tensors, end to end and without gaps, into a new [num_bytes] uint8 buffer on their device."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def from_buffer(buffer: torch.Tensor, like: Tensors) -> Tensors:
    """Return the tensors of a buffer that `to_buffer` made, in the shapes and dtypes of `like`.

    They are views of `buffer`; only a tensor that begins at an odd offset (a float32 behind three bytes, say),
    where memory cannot be read as its dtype, is a copy.

    Args:
        buffer: [num_bytes] uint8.
        like: tensors whose values do not matter.

    Raises:
        TransportError: the buffer has another size than `like`.
    """
    if buffer.numel() != num_bytes(like):
        raise TransportError(
            f"a message of {buffer.numel()} bytes came where {num_bytes(like)} were expected: "
            "do all workers run the same model and configuration?"
        )
    tensors, start = [], 0
    for tensor in like:
        end = start + tensor.numel() * tensor.element_size()
        part = buffer[start:end]
        if part.storage_offset() % tensor.element_size():
            part = part.clone()
        tensors.append(part.view(tensor.dtype).view(tensor.shape))
        start = end
    return tensors


def each_from_buffer(buffer: torch.Tensor, like: Tensors, num_ranks: int) -> list[Tensors]:
    """Return the tensors of every rank, which look like `like`, from their buffers end to end, in rank order."""
    size = num_bytes(like)
    return [from_buffer(buffer[rank * size : (rank + 1) * size], like) for rank in range(num_ranks)]


def all_gather_object(all_gather: Callable[[Tensors], list[Tensors]], value: Any) -> list[Any]:
    """Gather the values of all ranks, in rank order: whatever JSON can hold."""
    text = json.dumps(value).encode()
    sizes = [int(size) for (size,) in all_gather([torch.tensor(len(text))])]
    if min(sizes) < 0 or max(sizes) > _MAX_OBJECT_BYTES:
        raise TransportError(f"objects of {sizes} bytes were announced; {_MAX_OBJECT_BYTES} are allowed")
    padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
    return [json.loads(bytes(theirs.tolist())) for (theirs,) in all_gather([padded])]
