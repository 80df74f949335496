"""The compiled kernels and the torch code are the same codec, byte for byte."""

import multiprocessing
import os
import threading

import pytest
import torch

from isthmus.compress import dct, float4, quantize, topk
from isthmus.compress.base import Codec
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core.kernels import cpu, run_kernel

from .conftest import run_workers
from .test_contract import CONFIGS, REPLICATED, tensors_of

CODECS: list[Codec] = [
    *(Quantize(bits, block, scale_bits=s) for bits in (8, 4, 2) for block in (8, 20, 128) for s in (8, 16, 32)),
    *(Float4(f, block, s) for f in ("E3M0", "E2M1") for block in (6, 128) for s in (8, 16, 32)),
    *(TopK(keep, chunk, Quantize(8, block=1)) for keep, chunk in ((64, 4096), (1, 9), (9, 9), (5, 37), (20, 64))),
]


def rows_of(codec: Codec) -> torch.Tensor:
    """Random rows of many sizes, and every special value there is."""
    torch.manual_seed(0)
    rows = torch.randn(600, codec.row) * 10.0 ** torch.randint(-38, 38, (600, 1))
    rows[:50] = torch.randint(-3, 4, (50, codec.row)).float()  # ties
    rows[50:60] = 0.0
    rows[60:70] = -0.0
    rows[70:80] = 1e-42
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38, 1e-45, -0.0])
    for row in range(80, 140):
        rows[row, row % codec.row] = special[row % 6]
    return rows


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_same_bytes_and_same_bits_from_both_paths(codec, monkeypatch):
    rows = rows_of(codec)
    payloads, results = [], []
    for setting in ("1", "0"):
        monkeypatch.setenv("ISTHMUS_NATIVE", setting)
        payloads.append(codec.encode(rows))
        results.append(codec.decode(payloads[0]))
    assert torch.equal(*payloads)
    assert torch.equal(*(result.nan_to_num(nan=12345.0) for result in results))


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", REPLICATED)
def test_workers_with_and_without_kernels_agree_bit_for_bit(name, num_workers, monkeypatch):
    """Worker 0 takes the compiled path, the others torch: gathered or in two shots, all get the same mean."""
    here = threading.local()
    for module in (dct, float4, quantize, topk):
        monkeypatch.setattr(
            module, "run_kernel", lambda *args, **kwargs: here.rank == 0 and run_kernel(*args, **kwargs)
        )

    def work(peers):
        here.rank, state = peers.rank, {}
        CONFIGS[name].average(tensors_of(peers.rank), state, peers)
        return CONFIGS[name].average(tensors_of(peers.rank, 1), state, peers)[0]

    first, *others = run_workers(work, num_workers)
    for mean in others:
        assert all(torch.equal(a, b) for a, b in zip(mean, first, strict=True))


def test_kernels_built_for_another_processor_give_the_same_bytes(tmp_path, monkeypatch):
    """Without the instructions of this machine, and barely optimised."""
    rows = [rows_of(codec) for codec in CODECS]
    expected = [codec.encode(x) for codec, x in zip(CODECS, rows, strict=True)]
    cpu._library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_FLAGS", ["-O1", "-shared", "-fPIC"])
    try:
        assert cpu._library()
        for codec, x, payload in zip(CODECS, rows, expected, strict=True):
            assert torch.equal(codec.encode(x), payload)
    finally:
        cpu._library.cache_clear()


def test_the_compiled_path_is_the_one_taken(monkeypatch):
    x, out = torch.randn(4, 128), torch.empty(4, 130, dtype=torch.uint8)
    assert run_kernel("quantize", [x, out], 128, 8, 16)
    assert not run_kernel("quantize", [x.T.contiguous().T, out], 128, 8, 16)
    assert not run_kernel("quantize", [x.double(), out], 128, 8, 16)
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    assert not run_kernel("quantize", [x, out], 128, 8, 16)


def test_many_threads_give_the_same_bytes(monkeypatch):
    codec, rows = Quantize(4), torch.randn(40_000, 128)
    one = codec.encode(rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(codec.encode(rows), one)
    assert torch.equal(codec.decode(one), codec.decode(one.clone()))


@pytest.mark.processes
def test_several_processes_compile_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._library.cache_clear()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=lambda: os._exit(cpu._library() is None)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    cpu._library.cache_clear()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "isthmus").iterdir())) == 1


@pytest.mark.parametrize("whose", ["isthmus", "isthmus/kernels.so"])
def test_what_others_can_write_is_not_run(whose, tmp_path, monkeypatch, logged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._library.cache_clear()
    assert cpu._library() is not None
    (kernels,) = (tmp_path / "isthmus").iterdir()
    (tmp_path / "isthmus" if whose == "isthmus" else kernels).chmod(0o777)
    cpu._library.cache_clear()
    try:
        assert cpu._library() is None
        assert "can be written by them: own it, and chmod go-w" in logged.text
    finally:
        cpu._library.cache_clear()


@pytest.mark.processes
@pytest.mark.parametrize("broken", ["no compiler", "broken compiler", "broken cache"])
def test_without_a_compiler_torch_does_the_work(broken, tmp_path, monkeypatch):
    cpu._library.cache_clear()
    if broken == "broken cache":
        (tmp_path / "isthmus").write_text("a file where a folder should be")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", "false" if broken == "broken compiler" else "no-such-compiler")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        assert cpu._library() is None
        rows = torch.randn(3, 128)
        assert (Quantize(8).decode(Quantize(8).encode(rows)) - rows).abs().max() < 0.05
    finally:
        cpu._library.cache_clear()


@pytest.mark.parametrize("tile", [8, 16, 24, 64])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_transforms_of_tiles_have_the_same_bits_from_both_paths(tile, inverse, monkeypatch):
    """Kernels use that cosines are mirrored; tiles of 8 and 24 have halves that are no multiple of 8."""
    torch.manual_seed(0)
    tiles = torch.randn(40, tile, tile) * 10.0 ** torch.randint(-30, 30, (40, 1, 1))
    tiles[0], tiles[1, 0, 0] = 0.0, torch.inf
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("ISTHMUS_NATIVE", setting)
        results.append(tiles.clone())
        dct._transform(results[-1], inverse)
    assert torch.equal(*(result.nan_to_num(nan=12345.0) for result in results))
