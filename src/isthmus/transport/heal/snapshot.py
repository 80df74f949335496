"""A state in transit: a manifest (JSON, with a hash of every chunk) and chunks of raw tensor bytes.

The manifest's table of tensors is a safetensors header and the chunks, end to end, are a safetensors body: with the
table's length before it, that is a safetensors file. Equal states give equal bytes, whoever serialises them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from isthmus.core.flatten import flatten, unflatten
from isthmus.core.types import State, Tensors
from isthmus.transport.base import TransportError

CHUNK_BYTES = 4 << 20
MAX_CHUNK_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 8 << 20  # the manifest of 10,000 tensors in 64 GiB takes 2 MB

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HASH_BYTES = 32
_MAX_DIMS = 16
MAX_ID = 200  # characters


@dataclass(frozen=True)
class Snapshot:
    """A consistent state. Its tensors must not change as long as it is served."""

    id: str  # of the state, e.g. version and chain: equal on workers only where the states are equal, bit for bit
    state: State


@dataclass(frozen=True)
class TensorSpec:
    """The dtype, shape and place of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte in the body where it begins

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The state that a donor promises to send."""

    id: str
    skeleton: Any
    tensors: list[TensorSpec]  # by number
    chunk_bytes: int
    chunks: list[bytes]  # hash of each
    num_bytes: int  # of all tensors
    digest: str  # hash of the manifest itself, and so of everything

    @classmethod
    def parse(cls, text: bytes, max_bytes: int) -> Manifest:
        """Read a manifest that may come from anybody.

        Args:
            text: at most `MAX_MANIFEST_BYTES`.
            max_bytes: that the tensors may take.

        Raises:
            TransportError: it is malformed, or promises more than `max_bytes`.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TransportError("its manifest is not JSON") from error
        match plain:
            case {
                "id": str(name),
                "state": skeleton,
                "tensors": dict(table),
                "chunk_bytes": size,
                "chunks": list(hexes),
            }:
                tensors = _read_table(table, max_bytes)
            case _:
                raise TransportError("its manifest lacks a field, or has one of a wrong type")
        if len(name) > MAX_ID or type(size) is not int or not 0 < size <= MAX_CHUNK_BYTES:
            raise TransportError("its manifest has an impossible id or chunk size")
        num_bytes = sum(spec.num_bytes for spec in tensors)
        if len(hexes) != -(-num_bytes // size):
            raise TransportError("its manifest has a wrong number of chunks")
        try:
            unflatten(skeleton, tensors)
        except ValueError as error:
            raise TransportError(f"its manifest is malformed: {error}") from error
        return cls(name, skeleton, tensors, size, [_read_hash(item) for item in hexes], num_bytes, _hash([text]).hex())

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return the bytes [start, end) of the body that chunk `index` holds."""
        return index * self.chunk_bytes, min((index + 1) * self.chunk_bytes, self.num_bytes)


class Outgoing:
    """A snapshot made ready to be sent. Costs no memory beside the snapshot's own, if that is contiguous on the CPU.

    Args:
        snapshot: what to send.
        chunk_bytes: equal on all donors, or their manifests differ.

    Raises:
        TypeError: something in the state cannot be sent.
        ValueError: there is too much beside the tensors.
    """

    def __init__(self, snapshot: Snapshot, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.id = snapshot.id
        skeleton, tensors = flatten(snapshot.state)
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        specs = _lay_out([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        self._body = _Body(tensors, specs)
        self._chunk_bytes = chunk_bytes
        manifest = {
            "id": snapshot.id,
            "state": skeleton,
            "tensors": {str(number): _describe(spec) for number, spec in enumerate(specs)},
            "chunk_bytes": chunk_bytes,
            "chunks": [
                _hash(self._body.views(start, start + chunk_bytes)).hex()
                for start in range(0, self._body.num_bytes, chunk_bytes)
            ],
        }
        self.manifest = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
        if len(self.manifest) > MAX_MANIFEST_BYTES:
            raise ValueError(f"cannot send a state whose manifest takes more than {MAX_MANIFEST_BYTES >> 20} MiB")

    def chunk(self, index: int) -> list[memoryview]:
        """Return the bytes of a chunk, in pieces; none beyond the last."""
        start = index * self._chunk_bytes
        return list(self._body.views(start, start + self._chunk_bytes))


class Incoming:
    """A state that arrives chunk by chunk, in any order. Allocates exactly what the manifest promises."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in manifest.tensors]
        self._body = _Body(self._tensors, manifest.tensors)
        self.num_bytes = self._body.num_bytes

    def check(self, index: int, data: memoryview) -> bool:
        """Return whether `data` is chunk `index`."""
        return _hash([data]) == self.manifest.chunks[index]

    def write(self, index: int, data: memoryview) -> None:
        """Write a checked chunk where it belongs."""
        start = 0
        for view in self._body.views(*self.manifest.chunk_range(index)):
            view[:] = data[start : start + len(view)]
            start += len(view)

    def finish(self) -> State:
        """Return the state, once all chunks have been written; each tensor in memory of its own."""
        for tensor in self._tensors:
            if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
                raise TransportError("the state holds a bool that is neither 0 nor 1")
        return unflatten(self.manifest.skeleton, self._tensors)


class _Body:
    """The memory of tensors that lie apart, seen as one sequence of bytes."""

    def __init__(self, tensors: Tensors, specs: list[TensorSpec]) -> None:
        pieces = {spec.begin: _memory_of(tensor) for tensor, spec in zip(tensors, specs, strict=True) if tensor.numel()}
        self._begins = sorted(pieces)
        self._views = [pieces[begin] for begin in self._begins]
        self.num_bytes = sum(map(len, self._views))

    def views(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes [start, end), in pieces."""
        piece = bisect_right(self._begins, start) - 1
        while start < min(end, self.num_bytes):
            begin, view = self._begins[piece], self._views[piece]
            part = view[start - begin : end - begin]
            yield part
            start += len(part)
            piece += 1


def _memory_of(tensor: torch.Tensor) -> memoryview:
    buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(buffer)


def _lay_out(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[TensorSpec]:
    """Place tensors end to end: wide dtypes first, so that every value is aligned."""
    specs, begin = {}, 0
    for number in sorted(range(len(kinds)), key=lambda number: -kinds[number][0].itemsize):
        specs[number] = TensorSpec(*kinds[number], begin)
        begin += specs[number].num_bytes
    return [specs[number] for number in range(len(kinds))]


def _describe(spec: TensorSpec) -> dict[str, Any]:
    if spec.dtype not in _NAMES:
        raise TypeError(f"cannot send a tensor of {spec.dtype}")
    return {
        "dtype": _NAMES[spec.dtype],
        "shape": list(spec.shape),
        "data_offsets": [spec.begin, spec.begin + spec.num_bytes],
    }


def _read_table(table: dict[str, Any], max_bytes: int) -> list[TensorSpec]:
    kinds, room = [], max_bytes
    for number in range(len(table)):
        dtype, shape = _read_kind(table.get(str(number)))
        size = dtype.itemsize * prod(max(dim, 1) for dim in shape)  # torch counts strides of empty tensors so, too
        room -= size
        if room < 0:
            raise TransportError(f"its state takes more than the {max_bytes} bytes expected")
        kinds.append((dtype, shape))
    specs = _lay_out(kinds)
    if any(table[str(number)] != _describe(spec) for number, spec in enumerate(specs)):
        raise TransportError("its manifest lays out the tensors with gaps or overlaps")
    return specs


def _read_kind(entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    match entry:
        case {"dtype": str(name), "shape": list(shape)} if name in _DTYPES and len(shape) <= _MAX_DIMS:
            if all(type(dim) is int and dim >= 0 for dim in shape):
                return _DTYPES[name], tuple(shape)
    raise TransportError("its manifest describes a tensor of a kind unknown here")


def _read_hash(value: Any) -> bytes:
    try:
        hashed = bytes.fromhex(value)
    except (TypeError, ValueError):
        hashed = b""
    if len(hashed) != _HASH_BYTES:
        raise TransportError("its manifest holds what is no hash")
    return hashed


def _hash(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
