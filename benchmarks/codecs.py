"""Encoding and decoding 16M float32 on one thread, as multiples of `torch.clone` of the same tensor in the same run.

Run as `python -m benchmarks.codecs`, on a quiet machine: figures are medians over interleaved rounds, with the
compiled kernels and (ISTHMUS_NATIVE=0) with torch alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import write
from isthmus.compress.base import Codec
from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK

ROUNDS = 9
CODECS: dict[str, tuple[Codec, float | None]] = {  # with the goal for encode + decode, compiled
    "bf16": (Cast("bfloat16"), None),
    "int8": (Quantize(8), 3),
    "int4": (Quantize(4), 3),
    "2 bits": (Quantize(2), None),
    "E3M0": (Float4("E3M0"), 4),
    "E2M1": (Float4("E2M1"), None),
    "top-k 64 of 4096, 2 bits": (TopK(), 7),
}
DCT_GOAL = 7
TORCH_GOALS = {"int8": 8, "int4": 8}


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def operations(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Everything that is timed, by name; built with the path that is switched on."""
    timed: dict[str, Callable[[], Any]] = {}
    for name, (codec, _) in CODECS.items():
        rows = x.view(-1, codec.row)
        payload = codec.encode(rows)
        timed[f"{name}/encode"] = lambda codec=codec, rows=rows: codec.encode(rows)
        timed[f"{name}/decode"] = lambda codec=codec, payload=payload: codec.decode(payload)
    dct = DCT(Cast())
    coefficients = dct.to_rows([x])
    timed["DCT 64 x 64/forward"] = lambda: dct.to_rows([x])
    timed["DCT 64 x 64/inverse"] = lambda: dct.from_rows(coefficients, [x])  # in place: of whatever is there by then
    return timed


def measure() -> dict[str, dict[str, float]]:
    """Median ratio to the clone of the same round, for every path and operation."""
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    ratios: dict[str, dict[str, list[float]]] = {"compiled": {}, "torch": {}}
    clones = []
    for round_ in range(ROUNDS + 1):
        for path, setting in (("compiled", "1"), ("torch", "0")):
            os.environ["ISTHMUS_NATIVE"] = setting
            for name, function in operations(x).items():
                clone = statistics.median(seconds(x.clone) for _ in range(3))
                taken = seconds(function)
                if round_:  # the first one warms up
                    clones.append(clone)
                    ratios[path].setdefault(name, []).append(taken / clone)
    medians = {path: {name: statistics.median(all_) for name, all_ in table.items()} for path, table in ratios.items()}
    return {"clone_seconds": {"median": statistics.median(clones)}, **medians}


def main() -> None:
    torch.set_num_threads(1)
    result = measure()
    compiled, plain = result["compiled"], result["torch"]
    rows = []
    for name, (codec, goal) in CODECS.items():
        encode, decode = compiled[f"{name}/encode"], compiled[f"{name}/decode"]
        total, torch_total = encode + decode, plain[f"{name}/encode"] + plain[f"{name}/decode"]
        bits = 8 * codec.row_bytes / codec.row
        goals = verdict(total, goal) + (
            f", torch {verdict(torch_total, TORCH_GOALS[name])}" if name in TORCH_GOALS else ""
        )
        rows.append(
            [name, f"{bits:.3f}", f"{encode:.2f}", f"{decode:.2f}", f"{total:.2f}", f"{torch_total:.2f}", goals]
        )
    for way in ("forward", "inverse"):
        ratio, torch_ratio = (table[f"DCT 64 x 64/{way}"] for table in (compiled, plain))
        rows.append([f"DCT 64 x 64, {way}", "", "", "", f"{ratio:.2f}", f"{torch_ratio:.2f}", verdict(ratio, DCT_GOAL)])
    columns = ["codec", "bits a value", "encode", "decode", "both", "both, torch alone", "goal"]
    notes = [
        f"times `torch.clone` of 16,777,216 float32 ({1e3 * result['clone_seconds']['median']:.1f} ms), one thread, "
        f"each figure the median of {ROUNDS} rounds, each next to clones of its own",
        "compiled: kernels.cpp by the system's compiler; torch alone: ISTHMUS_NATIVE=0; both give the same bytes",
        f"load average of the machine meanwhile: {os.getloadavg()[1]:.1f}; only ratios within a run can be compared",
        "DCT: one way, of a 4,096 x 4,096 matrix, cutting into tiles included",
    ]
    for row in [columns, *rows]:
        print("  ".join(str(cell).ljust(24 if i == 0 else 14) for i, cell in enumerate(row)))
    print(write("codecs", "Codecs: encode and decode in multiples of a copy", columns, rows, notes, result))


def verdict(ratio: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f"<= {goal:g}: {'met' if ratio <= goal else 'missed'}"


if __name__ == "__main__":
    main()
