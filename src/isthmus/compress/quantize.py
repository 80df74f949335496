"""Block-wise symmetric quantisation to 8, 4 or 2 bits."""

from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from isthmus.compress.base import Codec, slices
from isthmus.compress.packing import ScaleBits, check_scale_bits, decode_scale, encode_scale, pack_bits, unpack_bits
from isthmus.core.kernels import run_kernel
from isthmus.core.types import Peers, State, UserError

_HALF_RANGE = {8: 127.0, 4: 7.0, 2: 1.5}  # codes 0 .. 2 * half stand for levels -1 .. 1 times the scale
_TWO_BIT_SCALE = 0.75  # of the largest magnitude: the smallest possible error, and the smallest residual


@dataclass(frozen=True)
class Quantize(Codec):
    """Blocks of `block` values on 255, 15 or 4 equidistant levels between -scale and scale.

    8 and 4 bits: the scale is the block's largest magnitude, rounded up, so nothing clips and the error is at most
    half a step. 2 bits (levels -1, -1/3, 1/3, 1): it is 3/4 of that, which makes the largest possible error smallest,
    a quarter of the largest magnitude; under error feedback the residual then stays below a third of the largest
    gradient, where scales that fit the bulk of a block let it grow without (docs/decisions/0005-two-bit-scale.md).

    With stochastic rounding the mean of the decoded values is the input; 2 bits then take the largest magnitude.
    A block with a value that is not finite decodes to values that are not finite. No single paper; 2 bits with
    error feedback are MuLoCo's (arXiv 2505.23725).
    """

    bits: Literal[8, 4, 2] = 8  # bits of a value
    block: int = 128  # values that share a scale; `block * bits` must fill whole bytes
    rounding: Literal["nearest", "stochastic"] = "nearest"  # to the nearest level, or up or down at random
    scale_bits: ScaleBits = 16  # 8 (unsigned minifloat), 16 (bfloat16) or 32 (float32)

    def __post_init__(self) -> None:
        if self.bits not in _HALF_RANGE:
            raise UserError(f"quantize: {self.bits} bits are not supported: use 8, 4 or 2")
        if self.rounding not in ("nearest", "stochastic"):
            raise UserError(f"quantize: unknown rounding {self.rounding!r}: use 'nearest' or 'stochastic'")
        if self.block < 1 or self.block * self.bits % 8:
            raise UserError(f"quantize: block {self.block} must be a positive multiple of {8 // self.bits}")
        check_scale_bits(self.scale_bits)

    @property
    @override
    def row(self) -> int:
        return self.block

    @property
    @override
    def row_bytes(self) -> int:
        return (self.scale_bits + self.block * self.bits) // 8

    @override
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        payload = rows.new_empty(len(rows), self.row_bytes, dtype=torch.uint8)
        if self._runs("quantize", rows, payload):
            return payload
        half, options = rows.new_tensor(_HALF_RANGE[self.bits]), (self.bits, self.scale_bits)
        nearest = self.rounding == "nearest"
        return torch.cat([_encode(part, half, *options, nearest, generator) for part in slices(rows)])

    @override
    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        payload = rows.new_empty(len(rows), self.row_bytes, dtype=torch.uint8)
        if self._runs("quantize_with_residual", rows, payload, residual):
            return payload
        return super().encode_with_residual(rows, residual, generator)

    @override
    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        rows = payload.new_empty(len(payload), self.block, dtype=torch.float32)
        if run_kernel("dequantize", [payload, rows], self.block, self.bits, self.scale_bits):
            return rows
        half = rows.new_tensor(_HALF_RANGE[self.bits])
        return _decode(payload, half, self.bits, self.block, self.scale_bits)

    @override
    def decode_mean(self, payloads: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        rows = payloads[0].new_empty(len(payloads[0]), self.block, dtype=torch.float32)
        options = (self.block, self.bits, self.scale_bits)
        if run_kernel("dequantize_mean", [*payloads, rows], *options, factors=weights):
            return rows
        return super().decode_mean(payloads, weights)

    def _runs(self, name: str, *tensors: torch.Tensor) -> bool:
        return self.rounding == "nearest" and run_kernel(name, tensors, self.block, self.bits, self.scale_bits)

    @override
    def _generator(self, state: State, peers: Peers, device: torch.device) -> torch.Generator | None:
        """Seeded by this worker's rank and by the syncs so far, so that a repeated sync draws the same numbers."""
        if self.rounding == "nearest":
            return None
        state["syncs"] = state.get("syncs", 0) + 1
        return torch.Generator(device).manual_seed(state["syncs"] * 1_000_003 + peers.rank)


# `half` comes as a tensor because of the divisions: those by or of a number are rounded otherwise on some devices.


def _encode(
    rows: torch.Tensor,
    half: torch.Tensor,
    bits: int,
    scale_bits: int,
    nearest: bool = True,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    largest = rows.abs().amax(dim=1, keepdim=True)
    if bits == 2 and nearest:
        largest *= _TWO_BIT_SCALE
    scale_code = encode_scale(largest, scale_bits)
    scale = decode_scale(scale_code)
    steps = rows * torch.where(scale > 0, half / scale, 0.0)
    steps = steps.nan_to_num_(nan=0.0).add_(half)  # NaN only where the scale is: the block is lost anyway
    if nearest:
        steps = steps.round_()
    else:
        lower = steps.floor()
        chance = torch.rand(steps.shape, device=steps.device, generator=generator)
        steps = lower.add_(chance < steps - lower)
    codes = steps.clamp_(0, 2 * _HALF_RANGE[bits]).to(torch.uint8)
    return torch.cat([scale_code, pack_bits(codes, bits)], dim=1)


def _decode(payload: torch.Tensor, half: torch.Tensor, bits: int, block: int, scale_bits: int) -> torch.Tensor:
    levels = unpack_bits(payload[:, scale_bits // 8 :], bits, block).float()
    return levels.sub_(half).div_(half).mul_(decode_scale(payload[:, : scale_bits // 8]))
