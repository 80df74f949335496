"""Numbers as bytes: whole ones, block scales, sub-byte packing of small integers, Elias-Fano coding of sorted indices.

Block scales are made with integer operations on the float's own bits: equal on every device.
"""

from typing import Literal

import torch

from isthmus.core.types import UserError

ScaleBits = Literal[8, 16, 32]

_SMALLEST = 2.0**-100  # smaller scales are zero, so that their reciprocals stay finite
_NAN = {8: 0xFF, 16: 0x7FC0}
_OFFSET = 332  # 8 bits: code 0 would stand for 2**-44, float32 exponent 83 = 332 / 4


def to_bytes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values [rows, count] cast to `dtype` as bytes [rows, count * itemsize] uint8, in memory of its own."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `to_bytes`; `data` may lie at any address, the result is aligned."""
    values = torch.empty(len(data), data.shape[1] // dtype.itemsize, dtype=dtype, device=data.device)
    values.view(torch.uint8).copy_(data)
    return values


def check_scale_bits(bits: int) -> None:
    """Raise a UserError for a width that has no format."""
    if bits not in (8, 16, 32):
        raise UserError(f"scale_bits {bits} is not supported: use 8, 16 or 32")


def encode_scale(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Encode scales [rows, 1] float32, not negative, as [rows, bits / 8] uint8: rounded up, so none is exceeded.

    8 bits: 6 of exponent and 2 of mantissa, 2**-44 (code 0, which means zero) to 1.5 * 2**19; code 255 means "not
    finite". 16 bits: bfloat16. 32 bits: float32. What is below the range (2**-100 for 16 and 32 bits) is sent as
    zero; what is above it, infinite or NaN decodes to a number that is not finite.
    """
    finite = scale.isfinite()
    scale = torch.where(scale < _SMALLEST, 0.0, scale)
    if bits == 32:
        return to_bytes(torch.where(finite, scale, torch.nan), torch.float32)
    shift = 16 if bits == 16 else 21
    code = scale.view(torch.int32).clamp(max=0x7F800000) + (2**shift - 1)
    code >>= shift
    if bits == 8:
        code = (code - _OFFSET).clamp_(0, _NAN[8])
    code = torch.where(finite, code, _NAN[bits])
    return to_bytes(code, torch.uint8 if bits == 8 else torch.int16)


def decode_scale(code: torch.Tensor) -> torch.Tensor:
    """Decode scales [rows, bits / 8] uint8 to [rows, 1] float32."""
    bits = 8 * code.shape[1]
    if bits == 32:
        return from_bytes(code, torch.float32)
    if bits == 16:
        return from_bytes(code, torch.bfloat16).float()
    scale = ((code.to(torch.int32) + _OFFSET) << 21).view(torch.float32)
    return torch.where(code == 0, 0.0, torch.where(code == _NAN[8], torch.nan, scale))


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `pack_bits` needs for a row of `count` values of `bits` bits."""
    return sum(-(-count * width // 8) for width in _widths(bits))


def pack_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [rows, count] integers below 2**bits into [rows, packed_bytes(count, bits)] uint8.

    A byte of 4-bit values holds value j of the row's first half below value j of its second half (for 2 bits:
    quarters, for 1 bit: eighths), so that packing works on whole slices instead of on neighbours. Other widths
    are cut into parts of 8, 4, 2 and 1 bits, one after the other.
    """
    parts, shift = [], 0
    for width in _widths(bits):
        part = values if width == bits else (values >> shift) & (2**width - 1)
        parts.append(_pack_power_of_two(part.to(torch.uint8), width))
        shift += width
    return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Undo `pack_bits`: [rows, packed_bytes(count, bits)] uint8 to [rows, count] uint8, int64 above 8 bits."""
    if bits in (1, 2, 4, 8):
        return _unpack_power_of_two(packed, bits, count)
    values = torch.zeros(len(packed), count, dtype=torch.int64, device=packed.device)
    start = shift = 0
    for width in _widths(bits):
        size = -(-count * width // 8)
        part = _unpack_power_of_two(packed[:, start : start + size], width, count)
        values |= part.to(torch.int64) << shift
        start, shift = start + size, shift + width
    return values


def _widths(bits: int) -> list[int]:
    """The parts of 8, 4, 2 and 1 bits that make up `bits`."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def _pack_power_of_two(values: torch.Tensor, bits: int) -> torch.Tensor:
    per_byte = 8 // bits
    padding = -values.shape[1] % per_byte
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    strips = values.chunk(per_byte, dim=1)
    packed = strips[0].clone(memory_format=torch.contiguous_format)
    for i, strip in enumerate(strips[1:], start=1):
        packed |= strip << (bits * i)
    return packed


def _unpack_power_of_two(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    if bits == 8:
        return packed[:, :count]
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)[:, :count]


def low_bits(keep: int, of: int) -> int:
    """Return the bits of an index that Elias-Fano coding stores as they are: floor(log2(of / keep))."""
    return (of // keep).bit_length() - 1


def sorted_bytes(keep: int, of: int) -> int:
    """Return the bytes that `pack_sorted` needs for `keep` indices below `of`."""
    return packed_bytes(keep, low_bits(keep, of)) + packed_bytes(_bitmap_bits(keep, of), 1)


def pack_sorted(indices: torch.Tensor, of: int) -> torch.Tensor:
    """Pack strictly increasing indices below `of`, [rows, keep] int64, into [rows, sorted_bytes(keep, of)] uint8.

    Elias-Fano: the l = `low_bits` low bits of each index as they are, then a bitmap of keep + ceil(of / 2**l) bits
    in which the bit at (high part + rank) stands for one index. For 64 of 4,096 that is 8 bits an index, where
    plain indices take 12 and the entropy bound is 7.36 (docs/decisions/0002-elias-fano-indices.md).
    """
    keep = indices.shape[1]
    low = low_bits(keep, of)
    position = (indices >> low) + torch.arange(keep, device=indices.device)
    bitmap = torch.zeros(len(indices), _bitmap_bits(keep, of), dtype=torch.uint8, device=indices.device)
    bitmap.scatter_(1, position, 1)
    high = pack_bits(bitmap, 1)
    return torch.cat([pack_bits(indices & (2**low - 1), low), high], dim=1) if low else high


def unpack_sorted(packed: torch.Tensor, keep: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack_sorted`: return [rows, keep] int64 indices, and [rows, 1] bool: whether the row is valid.

    Bytes that `pack_sorted` cannot have written give an invalid row; its indices are then the first `keep`.
    """
    low, size = low_bits(keep, of), _bitmap_bits(keep, of)
    start = packed_bytes(keep, low)
    bitmap = unpack_bits(packed[:, start:], 1, size)
    rank = torch.arange(keep, device=packed.device)
    count = bitmap.cumsum(dim=1)
    slots = torch.where(bitmap.bool(), (count - 1).clamp_(max=keep), keep)  # the last one is for what is not set
    positions = torch.arange(size, device=packed.device).expand(slots.shape)
    found = torch.zeros(len(packed), keep + 1, dtype=torch.int64, device=packed.device)
    high = found.scatter_(1, slots, positions)[:, :keep] - rank
    indices = high << low
    if low:
        indices = indices | unpack_bits(packed[:, :start], low, keep)
    increasing = (indices[:, 1:] > indices[:, :-1]).all(dim=1, keepdim=True)
    valid = increasing & (indices[:, -1:] < of) & (count[:, -1:] == keep)
    return torch.where(valid, indices, rank), valid


def _bitmap_bits(keep: int, of: int) -> int:
    return keep + -(-of >> low_bits(keep, of))
