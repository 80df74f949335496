"""Block scales in 8, 16 or 32 bits, made with integer operations on the float's own bits: equal on every device."""

from typing import Literal

import torch

from isthmus.compress.packing import from_bytes, to_bytes
from isthmus.core.types import UserError

ScaleBits = Literal[8, 16, 32]

_SMALLEST = 2.0**-100  # smaller scales are zero, so that their reciprocals stay finite
_NAN = {8: 0xFF, 16: 0x7FC0}
_OFFSET = 332  # 8 bits: code 0 would stand for 2**-44, float32 exponent 83 = 332 / 4


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
