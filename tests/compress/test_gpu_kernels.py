"""Kernels for a GPU: the same bytes as from torch, on the GPU that is here, or else by Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.compress.base import Codec
from isthmus.compress.dct import DCT
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import kernels
from isthmus.core.kernels import cpu, gpu

from .test_cpu_kernels import CODECS, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the interpreter runs what is compiled for a GPU


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels of a GPU that ran; no others run."""
    names, run = set[str](), gpu.run

    def note(name: str, *args: Any, **kwargs: Any) -> bool:
        ran = run(name, *args, **kwargs)
        names.update([name] if ran else [])
        return ran

    monkeypatch.setattr(gpu, "run", note)
    monkeypatch.setattr(cpu, "run", note)
    monkeypatch.setattr(kernels, "_is_triton_broken", False)
    return names


def all_results(codec: Codec, rows: torch.Tensor) -> list[torch.Tensor]:
    """Whatever a codec makes of some rows: payloads, what they lose, what they decode to, and a mean."""
    residual = torch.full_like(rows, 7.0)
    payload, payload_with_residual = codec.encode(rows), codec.encode_with_residual(rows, residual)
    other = codec.encode(0.37 * rows.flip(0))
    mean = codec.decode_mean([payload, other, payload], [0.25, 0.3, 0.45])
    results = [payload, payload_with_residual, residual, codec.decode(payload), mean]
    return [_bits(result.cpu()) for result in results]


def _bits(result: torch.Tensor) -> torch.Tensor:
    """Bytes, or the bits of floats, in which zeros have signs and NaN is NaN."""
    return torch.where(result.isnan(), torch.nan, result).view(torch.int32) if result.is_floating_point() else result


@pytest.mark.parametrize("codec", [*CODECS, TopK(), DCT(TopK(256))], ids=str)
def test_the_same_bytes_and_bits_as_from_torch(codec: Codec, launched: set[str], monkeypatch) -> None:
    rows = codec.to_rows([rows_of(codec)[: 150 if codec.row <= 128 else 140]])
    if DEVICE == "cpu" and codec.row > 128:
        rows = rows[:140:7]  # the interpreter takes 24 ms for each
    found = all_results(codec, rows.to(DEVICE))
    if isinstance(codec, Quantize):
        assert launched == {"quantize", "quantize_with_residual", "dequantize", "dequantize_mean"}
    elif isinstance(codec, Float4):
        assert launched == {"float4_encode", "float4_encode_with_residual", "float4_decode", "float4_decode_mean"}
    else:
        assert "largest" in launched
    assert not kernels._is_triton_broken
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    assert all(map(torch.equal, found, all_results(codec, rows)))


@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_rows_that_do_not_fill_programs(num_rows: int, launched: set[str], monkeypatch) -> None:
    rows = torch.randn(num_rows, 128)
    found = all_results(Quantize(4), rows.to(DEVICE))
    assert launched
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    assert all(map(torch.equal, found, all_results(Quantize(4), rows)))


def test_where_triton_does_not_work_torch_does_and_one_line_says_so(launched: set[str], monkeypatch, logged) -> None:
    def broken(*args: Any, **kwargs: Any) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(gpu, "run", broken)
    monkeypatch.setattr(cpu, "run", kernels._run_on_gpu)
    rows = torch.randn(5, 128)
    found = [all_results(Quantize(8), rows) for _ in range(2)]
    assert logged.messages == [
        "codecs take several times as long on this GPU: Triton does not work here: Failed to find C compiler."
    ]
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    for results in found:
        assert all(map(torch.equal, results, all_results(Quantize(8), rows)))


@pytest.mark.processes
def test_compiled_for_a_gpu_nothing_is_rounded_otherwise() -> None:
    """For an H100, without one: no fused multiply-add, no approximate division, no small number taken for zero."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    assembly = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    instructions = re.findall(r"^\s+(?:@%p\d+ )?([a-z]\S*\.f32)\s", assembly.stdout, re.MULTILINE)
    assert {"div.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32"} <= set(instructions)
    assert not [each for each in instructions if re.search(r"fma|ftz|approx|full", each)]
    roundings = set(re.findall(r"cvt\.(\S*bf16\S*)\.f32", assembly.stdout))
    assert roundings
    assert roundings <= {"rn.bf16", "rn.bf16x2"}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("codec", [*CODECS, TopK(), DCT(TopK(256))], ids=str)
def test_torch_gives_the_same_bytes_and_bits_on_a_gpu(codec: Codec, monkeypatch) -> None:
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    rows = codec.to_rows([rows_of(codec)])
    assert all(map(torch.equal, all_results(codec, rows.cuda()), all_results(codec, rows)))
