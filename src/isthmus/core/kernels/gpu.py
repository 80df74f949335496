"""Kernels on a GPU: how they are launched."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

from isthmus.core.kernels import gpu_kernels

OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
_TILE_VALUES = 4096  # of a program
_ONE = (1.0,)


def run(
    name: str,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    table: torch.Tensor | None,
    factors: Sequence[float],
) -> bool:
    """Run a kernel as `run_kernel` says; False where there is none of this name."""
    launch = _LAUNCHERS.get(name)
    if launch is None:
        return False
    options: dict[str, Any] = {"factors": tuple(map(float, factors))} if factors else {}
    if table is not None:
        options["table"] = _table_on(tensors[0].device, tuple(table.tolist()))
    if len(tensors[0]):
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            launch(tensors, *numbers, **options)
    return True


@functools.cache
def _table_on(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, device=device)


def _quantize(tensors: Sequence[torch.Tensor], block: int, bits: int, scale_bits: int) -> None:
    rows, payload, *residual = tensors
    arguments, constants = (rows, payload, *(residual or [rows])), (bits, scale_bits, bool(residual))
    _launch(gpu_kernels.quantize, arguments, len(rows), block, constants, block * bits // 8)


def _dequantize(
    tensors: Sequence[torch.Tensor], block: int, bits: int, scale_bits: int, factors: tuple[float, ...] = _ONE
) -> None:
    *payloads, rows = tensors
    arguments, constants = (tuple(payloads), factors, rows), (bits, scale_bits)
    _launch(gpu_kernels.dequantize, arguments, len(rows), block, constants, block * bits // 8)


def _float4_encode(tensors: Sequence[torch.Tensor], block: int, scale_bits: int, table: torch.Tensor) -> None:
    rows, payload, *residual = tensors
    arguments, constants = (rows, payload, *(residual or [rows]), table), (scale_bits, bool(residual))
    _launch(gpu_kernels.float4_encode, arguments, len(rows), block, constants, block // 2)


def _float4_decode(
    tensors: Sequence[torch.Tensor],
    block: int,
    scale_bits: int,
    table: torch.Tensor,
    factors: tuple[float, ...] = _ONE,
) -> None:
    *payloads, rows = tensors
    arguments = (tuple(payloads), factors, rows, table)
    _launch(gpu_kernels.float4_decode, arguments, len(rows), block, (scale_bits,), block // 2)


def _largest(tensors: Sequence[torch.Tensor], chunk: int, keep: int) -> None:
    _launch(gpu_kernels.largest, tuple(tensors), len(tensors[0]), chunk, (keep,), chunk)


def _outer_sgd(tensors: Sequence[torch.Tensor], *constants: int, factors: tuple[float, ...]) -> None:
    grid = (triton.cdiv(len(tensors[0]), _TILE_VALUES),)
    arguments = (*tensors, len(tensors[0]), *factors, *map(bool, constants[:2]), constants[2])
    gpu_kernels.outer_sgd[grid](*arguments, _TILE_VALUES, **OPTIONS)


def _launch(
    kernel: Any, arguments: tuple[Any, ...], num_rows: int, row: int, constants: tuple[int, ...], width: int
) -> None:
    """Launch a kernel with a program for as many rows as fill a tile.

    Args:
        kernel: of gpu_kernels.py.
        arguments: tensors, and tuples of tensors or numbers.
        num_rows: of all tensors but tables.
        row: values of a row.
        constants: what the kernel is compiled for, beside `row` and the tile.
        width: of the tile; its columns stand for `row / width` values each.
    """
    columns = triton.next_power_of_2(width)
    most = max(1, _TILE_VALUES * width // (row * columns))
    rows = 1 << (most.bit_length() - 1)
    kernel[triton.cdiv(num_rows, rows),](*arguments, num_rows, row, *constants, rows, columns, **OPTIONS)


_LAUNCHERS: dict[str, Callable[..., None]] = {
    "quantize": _quantize,
    "quantize_with_residual": _quantize,
    "dequantize": _dequantize,
    "dequantize_mean": _dequantize,
    "float4_encode": _float4_encode,
    "float4_encode_with_residual": _float4_encode,
    "float4_decode": _float4_decode,
    "float4_decode_mean": _float4_decode,
    "largest": _largest,
    "outer_sgd": _outer_sgd,
}
