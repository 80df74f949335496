"""Four-bit floating point: E3M0 and E2M1."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from isthmus.compress.base import Codec, slices
from isthmus.compress.packing import ScaleBits, check_scale_bits, decode_scale, encode_scale, pack_bits, unpack_bits
from isthmus.core.kernels import run_kernel
from isthmus.core.types import UserError

_MAGNITUDES = {
    "E3M0": [0.0] + [2.0**-k for k in range(6, -1, -1)],
    "E2M1": [magnitude / 6 for magnitude in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
}


@dataclass(frozen=True)
class Float4(Codec):
    """A sign and one of 8 magnitudes per value, times the block's largest magnitude, rounded up.

    E3M0 (Streaming DiLoCo, arXiv 2501.18512): 0 and seven powers of two, 1/64 to 1. E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6,
    over 6. Values go to the nearest in linear distance, so the relative error of E3M0 is at most 1/3 from its
    smallest magnitude up. A block with a value that is not finite decodes to values that are not finite.
    """

    format: Literal["E3M0", "E2M1"] = "E3M0"  # bits of exponent and mantissa
    block: int = 128  # values that share a scale; even
    scale_bits: ScaleBits = 16  # 8 (unsigned minifloat), 16 (bfloat16) or 32 (float32)

    def __post_init__(self) -> None:
        if self.format not in _MAGNITUDES:
            raise UserError(f"float4: unknown format {self.format!r}: use 'E3M0' or 'E2M1'")
        if self.block < 2 or self.block % 2:
            raise UserError(f"float4: block {self.block} must be even and positive")
        check_scale_bits(self.scale_bits)

    @property
    @override
    def row(self) -> int:
        return self.block

    @property
    @override
    def row_bytes(self) -> int:
        return self.scale_bits // 8 + self.block // 2  # the scale, then two values a byte

    @override
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        payload = rows.new_empty(len(rows), self.row_bytes, dtype=torch.uint8)
        if self._runs("float4_encode", rows, payload):
            return payload
        one, midpoints = rows.new_tensor(1.0), tuple(_table(self.format)[:7].tolist())
        return torch.cat([_encode(part, one, midpoints, self.scale_bits) for part in slices(rows)])

    @override
    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        payload = rows.new_empty(len(rows), self.row_bytes, dtype=torch.uint8)
        if self._runs("float4_encode_with_residual", rows, payload, residual):
            return payload
        return super().encode_with_residual(rows, residual, generator)

    @override
    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        rows = payload.new_empty(len(payload), self.block, dtype=torch.float32)
        if self._runs("float4_decode", payload, rows):
            return rows
        return _decode(payload, _table(self.format)[7:].to(payload.device), self.block, self.scale_bits)

    @override
    def decode_mean(self, payloads: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        rows = payloads[0].new_empty(len(payloads[0]), self.block, dtype=torch.float32)
        if self._runs("float4_decode_mean", *payloads, rows, factors=weights):
            return rows
        return super().decode_mean(payloads, weights)

    def _runs(self, name: str, *tensors: torch.Tensor, factors: Sequence[float] = ()) -> bool:
        table = _table(self.format)
        return run_kernel(name, tensors, self.block, self.scale_bits, table=table, factors=factors)


@functools.cache
def _table(name: str) -> torch.Tensor:
    """Return the 7 midpoints between neighbouring magnitudes, then the values of the 16 codes."""
    magnitudes = torch.tensor(_MAGNITUDES[name])
    return torch.cat([(magnitudes[1:] + magnitudes[:-1]) / 2, magnitudes, -magnitudes])


def _encode(rows: torch.Tensor, one: torch.Tensor, midpoints: tuple[float, ...], scale_bits: int) -> torch.Tensor:
    """`one` is a tensor because of the division: that of a number is rounded otherwise on some devices."""
    magnitude = rows.abs()
    scale_code = encode_scale(magnitude.amax(dim=1, keepdim=True), scale_bits)
    scale = decode_scale(scale_code)
    magnitude *= torch.where(scale > 0, one / scale, 0.0)
    code = (rows < 0).to(torch.uint8) * 8
    for midpoint in midpoints:
        code += magnitude >= midpoint
    return torch.cat([scale_code, pack_bits(code, 4)], dim=1)


def _decode(payload: torch.Tensor, values: torch.Tensor, block: int, scale_bits: int) -> torch.Tensor:
    scale_bytes = scale_bits // 8
    codes = unpack_bits(payload[:, scale_bytes:], 4, block)
    rows = values.index_select(0, codes.view(-1).int()).view(codes.shape)
    return rows.mul_(decode_scale(payload[:, :scale_bytes]))
