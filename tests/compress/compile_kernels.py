"""Compile every kernel of a GPU for an H100, on any machine, and print the assembly."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isthmus.core.kernels import gpu, gpu_kernels

TILE = {"ROWS": 32, "WIDTH": 64}
ENCODED, TWO = {"payload": "*u8", "residual": "*fp32"}, {"payloads": ("*u8", "*u8"), "weights": ("fp32", "fp32")}
ROWS, TABLE = {"rows": "*fp32", "num_rows": "i32"}, {"table": "*fp32"}
FLOAT4 = {"BLOCK": 128, "SCALE_BITS": 16}


def show(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Compile one of them and print it."""
    source = ASTSource(kernel, {**arguments, **dict.fromkeys(constants, "constexpr")}, constants)
    options = {"num_warps": 4, **gpu.OPTIONS}
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


for bits in (8, 4, 2):
    constants = {**FLOAT4, "BITS": bits, **TILE, "WIDTH": 16 * bits}
    show(gpu_kernels.quantize, {**ROWS, **ENCODED}, {**constants, "WITH_RESIDUAL": True})
    show(gpu_kernels.dequantize, {**TWO, **ROWS}, constants)
show(gpu_kernels.float4_encode, {**ROWS, **ENCODED, **TABLE}, {**FLOAT4, **TILE, "WITH_RESIDUAL": True})
show(gpu_kernels.float4_decode, {**TWO, **ROWS, **TABLE}, {**FLOAT4, **TILE})
show(gpu_kernels.largest, {**ROWS, "indices": "*i64"}, {"CHUNK": 4096, "KEEP": 64, "ROWS": 1, "WIDTH": 4096})
tensors = dict.fromkeys(("anchor", "gradient", "momentum", "left"), "*fp32") | {"param": "*bf16", "num_values": "i32"}
constants = {"HAS_MOMENTUM": True, "NESTEROV": True, "FORM": 1, "SIZE": 4096}
show(gpu_kernels.outer_sgd, tensors | dict.fromkeys(("lr", "mu", "share", "other_share"), "fp32"), constants)
