"""Codecs on a GPU: the same bytes as on a CPU, from a compiled form that is only used where it gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.compress import fused, quantize
from isthmus.compress.base import Codec
from isthmus.compress.dct import DCT
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK

from .test_native import rows_of

CODECS: list[Codec] = [
    Quantize(8),
    Quantize(4),
    Quantize(2, 64, scale_bits=8),
    Float4("E3M0"),
    Float4("E2M1", scale_bits=32),
]
HALF = torch.tensor(7.0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels with their arguments, as the codecs run them."""
    calls: list[tuple[Any, ...]] = []

    def run(kernel: fused.Kernel, *arguments: Any) -> torch.Tensor:
        calls.append((kernel, *arguments))
        return kernel(*arguments)

    monkeypatch.setattr(fused, "run_compiled", run)
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    return calls


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_torch_sees_each_kernel_as_one_graph_with_the_same_bits(codec: Codec, seen: list[tuple[Any, ...]]) -> None:
    codec.decode(codec.encode(rows_of(codec)))
    assert len(seen) == 2
    for kernel, rows, *others in seen:
        traced = torch.compile(kernel, fullgraph=True, backend="eager")
        assert fused.agree(kernel, traced, rows, *others)
        assert fused.agree(kernel, traced, fused.sample(rows.shape[1], rows.dtype), *others)


def test_a_form_that_differs_in_one_bit_or_does_not_compile_is_not_used() -> None:
    def wrong(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        payload = quantize._encode(rows, *others)
        payload[-1, -1] ^= 1
        return payload

    def broken(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        raise RuntimeError("no compiler")

    for fast in (wrong, broken):
        key = (torch.device("cpu"), torch.float32, 128, (4, 16, fast))
        assert fused._faithful(quantize._encode, fast, key, (HALF, 4, 16)) is quantize._encode
    key = (torch.device("cpu"), torch.float32, 128, (4, 16))
    assert (
        fused._faithful(quantize._encode, torch.no_grad()(quantize._encode), key, (HALF, 4, 16)) is not quantize._encode
    )


def test_a_sample_holds_what_is_rare() -> None:
    rows = fused.sample(128, torch.float32)
    assert rows.isnan().any()
    assert rows.isinf().any()
    assert ((rows != 0) & (rows.abs() < 1e-38)).any()
    assert fused.sample(66, torch.uint8).unique().numel() == 256


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", ["1", "0"])
@pytest.mark.parametrize("codec", [*CODECS, TopK(), DCT(TopK(256))], ids=str)
def test_a_gpu_gives_the_same_bytes_and_bits_as_a_cpu(codec: Codec, setting: str, monkeypatch) -> None:
    monkeypatch.setenv("ISTHMUS_NATIVE", setting)
    rows = codec.to_rows([rows_of(codec)])
    payload = codec.encode(rows)
    assert torch.equal(codec.encode(rows.cuda()).cpu(), payload)
    decoded = codec.decode(payload.cuda()).cpu()
    assert torch.equal(decoded.nan_to_num(nan=12345.0), codec.decode(payload).nan_to_num(nan=12345.0))
    if setting == "1":
        assert all(kernel is not fast for (kernel, _), fast in fused._chosen.items()), "a compiled form was turned down"
