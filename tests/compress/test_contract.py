"""What every registered compressor owes, in several configurations and with 1, 2, 3 and 5 workers."""

import copy
import functools
from typing import Any

import pytest
import torch

from isthmus.compress import COMPRESSORS
from isthmus.compress.base import Codec, Compressor, NotFinite
from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.float4 import Float4
from isthmus.compress.lowrank import LowRank
from isthmus.compress.momentum import SharedMomentum
from isthmus.compress.quantize import Quantize
from isthmus.compress.robust import CentredClip, Median, NormClip, RobustMean, TrimmedMean
from isthmus.compress.topk import TopK
from isthmus.core.types import Tensors

from .conftest import run_workers

CONFIGS: dict[str, Compressor] = {
    "fp32": Cast(),
    "bf16": Cast("bfloat16"),
    "fp16": Cast("float16"),
    "int8": Quantize(8, block=64),
    "int4": Quantize(4, scale_bits=8),
    "int4-stochastic": Quantize(4, block=32, rounding="stochastic", scale_bits=32),
    "2bit": Quantize(2),
    "2bit-stochastic": Quantize(2, rounding="stochastic"),
    "e3m0": Float4("E3M0"),
    "e2m1": Float4("E2M1", block=16, scale_bits=32),
    "topk": TopK(),
    "topk-fp32": TopK(keep=5, chunk=37, values=Cast()),
    "topk-stochastic": TopK(keep=8, chunk=64, values=Quantize(8, block=8, rounding="stochastic")),
    "topk-all": TopK(keep=16, chunk=16, values=Cast()),
    "dct-fp32": DCT(Cast()),
    "dct-int8": DCT(Quantize(8), tile=16),
    "dct-topk": DCT(TopK(keep=4, chunk=64, values=Cast("float16")), tile=8),
    "lowrank": LowRank(2),
    "lowrank-int4": LowRank(1, factors=Quantize(4, block=16), bypass=Quantize(8)),
    "lowrank-adaptive": LowRank(3, window=2),
    "lowrank-feedback": LowRank(3, factors=ErrorFeedback(Quantize(8)), bypass=Cast()),
    "feedback-topk": ErrorFeedback(TopK(keep=8, chunk=64, values=Cast()), decay=0.95),
    "feedback-lowrank": ErrorFeedback(LowRank(2, factors=Quantize(4))),
    "feedback-dct-stochastic": ErrorFeedback(DCT(Quantize(4, block=64, rounding="stochastic"), tile=8)),
    "momentum": SharedMomentum(DCT(TopK(keep=4, chunk=64, values=Cast()), tile=8), decay=0.9),
    "median": Median(),
    "median-int8": ErrorFeedback(Median(Quantize(8))),
    "trimmed": TrimmedMean(Cast("float16"), trim=1),
    "norm-clip": NormClip(DCT(Cast(), tile=16)),
    "centred-clip": CentredClip(Quantize(8, block=32, rounding="stochastic")),
}
LOSSLESS = ["fp32", "topk-all", "dct-fp32"]
CODECS = [name for name, config in CONFIGS.items() if isinstance(config, Codec) and name != "fp32"]
ROBUST = [name for name, c in CONFIGS.items() if isinstance(getattr(c, "compressor", c), RobustMean)]
REPLICATED = [name for name, config in CONFIGS.items() if config.replicated]
MEANS = [name for name in REPLICATED if name not in ROBUST]
WEIGHTS = {1: [1.0], 2: [0.25, 0.75], 3: [0.5, 0.3, 0.2], 5: [0.1, 0.4, 0.2, 0.2, 0.1]}
SHAPES = [(65, 33), (5, 7), (3,), (), (0,), (0, 4), (130,), (8, 8), (4, 3, 5), (2, 17, 19), (64, 64)]


def tensors_of(rank: int, round_: int = 0) -> Tensors:
    """Pseudo-gradients of one worker: odd sizes, empty, one element, a constant, zeros, bf16."""
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors.append(tensors[0].to(torch.bfloat16))
    return [*tensors, torch.full((40,), 0.5), torch.zeros(33)]


def average(
    config: Compressor, num_workers: int, weights: list[float] | None = None, inputs: Any = tensors_of, rounds: int = 1
) -> list[tuple[Tensors, Tensors, dict[str, Any], int]]:
    """Everybody's (mean, residual, state, sent bytes) after the last round."""

    def work(peers):
        state: dict[str, Any] = {}
        for round_ in range(rounds):
            mean, residual = config.average(inputs(peers.rank, round_), state, peers)
        return mean, residual, state, peers.sent_bytes

    return run_workers(work, num_workers, weights)


def average_thrice(config: Compressor, weights: list[float]) -> list[list[tuple[Tensors, Tensors]]]:
    """Everybody's (mean, residual) after each of three rounds."""

    def work(peers):
        state: dict[str, Any] = {}
        return [config.average(tensors_of(peers.rank, round_), state, peers) for round_ in range(3)]

    return run_workers(work, len(weights), weights)


def weighted(everybody: list[Tensors], weights: list[float]) -> Tensors:
    """Reference: the weighted mean in float64."""
    return [
        sum(t.double() * w for t, w in zip(column, weights, strict=True)) for column in zip(*everybody, strict=True)
    ]


def assert_close(actual: Tensors, expected: Tensors, atol: float = 3e-6) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


def test_every_registered_compressor_is_tested():
    names = {COMPRESSORS.name_of(type(config)) for config in CONFIGS.values()}
    assert names == set(COMPRESSORS.names())
    assert all(COMPRESSORS.get(name) for name in names)


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), [0.0, 0.7, 0.3]], ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_what_was_sent_is_what_was_averaged_and_all_get_the_same_bits(name, weights):
    """The weighted mean of (local - residual) is the mean, also where owners encode a second time, or with a past."""
    for round_, results in enumerate(zip(*average_thrice(CONFIGS[name], weights), strict=True)):
        sent = [
            [t.float() - r for t, r in zip(tensors_of(rank, round_), residual, strict=True)]
            for rank, (_, residual) in enumerate(results)
        ]
        assert_close(results[0][0], weighted(sent, weights))
        for mean, residual in results:
            assert all(torch.equal(a, b) for a, b in zip(mean, results[0][0], strict=True))
            assert all(t.dtype == torch.float32 for t in mean + residual)


@pytest.mark.parametrize("num_workers", WEIGHTS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_identity_18_lossless_compressors_return_the_weighted_mean(name, num_workers):
    weights = WEIGHTS[num_workers]
    expected = weighted([tensors_of(rank) for rank in range(num_workers)], weights)
    for mean, residual, _, _ in average(CONFIGS[name], num_workers, weights):
        assert_close(mean, expected)
        assert_close(residual, [torch.zeros_like(t) for t in expected])
    uniform = average(CONFIGS[name], num_workers)[0][0]
    everybody = zip(*map(tensors_of, range(num_workers)), strict=True)
    assert_close(uniform, [torch.stack(column).float().mean(0) for column in everybody])


@pytest.mark.parametrize("num_workers", [3, 4])
@pytest.mark.parametrize("name", ROBUST)
def test_robust_means_have_the_same_bits_on_every_peer(name, num_workers):
    first, *others = average(CONFIGS[name], num_workers, rounds=2)
    for mean, residual, _, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(mean, first[0], strict=True))
        assert all(t.dtype == torch.float32 for t in mean + residual)


@pytest.mark.parametrize("name", MEANS)
def test_own_message_and_residual_make_the_input(name, path):
    ((message, residual, _, _),) = average(CONFIGS[name], 1)
    assert_close([a + b for a, b in zip(message, residual, strict=True)], [t.float() for t in tensors_of(0)])


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_inputs_same_bits_over_several_rounds(name, num_workers):
    first, second = (average(CONFIGS[name], num_workers, rounds=3) for _ in range(2))
    for (mean, residual, state, sent), (mean2, residual2, state2, sent2) in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mean + residual, mean2 + residual2, strict=True))
        assert equal_states(state, state2)
        assert sent == sent2


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_identity_30_inputs_and_old_state_are_never_mutated(name, num_workers):
    """A refused sync is undone by dropping a shallow copy of the state."""

    def work(peers):
        local, state = tensors_of(peers.rank), {}
        CONFIGS[name].average(local, state, peers)
        before = copy.deepcopy(state)
        CONFIGS[name].average(local, dict(state), peers)
        untouched = all(torch.equal(a, b) for a, b in zip(local, tensors_of(peers.rank), strict=True))
        return untouched and equal_states(state, before)

    assert run_workers(work, num_workers) == [True] * num_workers


def equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal_states(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_workers", [3, 4])
def test_identity_18_a_worker_of_weight_zero_has_no_effect(name, num_workers):
    """Not even when it holds NaN; nor does it get anything but the mean of the others."""
    weights = [0.5, 0.0, 0.5, 0.0][:num_workers]

    def spoilt(rank: int, round_: int) -> Tensors:
        return [torch.full_like(t, torch.nan) if weights[rank] == 0 else t for t in tensors_of(rank, round_)]

    good, bad = average(CONFIGS[name], num_workers, weights), average(CONFIGS[name], num_workers, weights, spoilt)
    for rank in (0, 2) if name == "momentum" else range(num_workers):
        assert all(torch.equal(a, b) for a, b in zip(good[rank][0], bad[rank][0], strict=True))


@pytest.mark.parametrize("name", ["fp32", "topk", "topk-fp32", "dct-topk", "feedback-topk"])
def test_identity_20_absent_workers_do_not_shrink_the_mean(name):
    """A third worker of weight zero leaves exactly the mean of the two that are there, not 2/3 of it."""
    two = average(CONFIGS[name], 2, [0.5, 0.5])
    three = average(CONFIGS[name], 3, [0.5, 0.5, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(two[0][0], three[0][0], strict=True))


@pytest.mark.parametrize("name", [name for name in CODECS if "stochastic" not in name])  # its dice belong to ranks
def test_identity_21_order_of_workers_does_not_matter(name):
    forward = average(CONFIGS[name], 2)[0][0]
    backward = average(CONFIGS[name], 2, inputs=lambda rank, round_: tensors_of(1 - rank, round_))[0][0]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))


@pytest.mark.parametrize("num_workers", WEIGHTS)
@pytest.mark.parametrize("name", CODECS)
def test_identity_33_sent_bytes_are_the_formula(name, num_workers):
    codec, total = CONFIGS[name], sum(t.numel() for t in tensors_of(0))
    num_rows = -(-total // codec.row)
    if isinstance(codec, DCT):
        side = codec.tile
        matrices = [(65, 33), (65, 33), (64, 64), (8, 8), (2, 17 * 19)]
        wide = [(n, m) for n, m in matrices if min(n, m) >= side]
        tiles = sum(-(-n // side) * -(-m // side) for n, m in wide)
        tiles += -(-(total - sum(n * m for n, m in wide)) // side**2)
        num_rows = tiles * side**2 // codec.row
    message = num_rows * codec.row_bytes
    assert codec.encode(codec.to_rows(tensors_of(0))).numel() == message
    sent = [result[3] for result in average(codec, num_workers)]
    few = num_workers < 2 * 4 * codec.row / codec.row_bytes  # identity 35: M < 2b/s
    if num_workers <= 2 or (codec.sparse and few):  # to each of the others
        assert sent == [(num_workers - 1) * message] * num_workers
    else:  # parts to their owners, then the own part of the mean, padded to the largest, to each of the others
        parts = [num_rows * (i + 1) // num_workers - num_rows * i // num_workers for i in range(num_workers)]
        largest = (num_workers - 1) * max(parts)
        assert sent == [(num_rows - part + largest) * codec.row_bytes for part in parts]


PLAIN: dict[str, Tensors] = {
    "none": [],
    "empty": [torch.zeros(0)],
    "empties": [torch.zeros(0, 7), torch.zeros(0)],
    "one": [torch.ones(1)],
    "scalar": [torch.tensor(-2.0)],
    "zeros": [torch.zeros(130, 70)],
    "constant": [torch.full((130, 70), -3.0)],
    "subnormal": [torch.full((9,), 1e-40)],
    "bf16": [torch.ones(7, 11, dtype=torch.bfloat16)],
    "zeros-and-ones": [torch.zeros(64, 64), torch.ones(64, 64)],
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_identity_23_plain_tensors_are_never_nan(name, num_workers):
    for kind, tensors in PLAIN.items():
        for mean, residual, _, _ in average(CONFIGS[name], num_workers, inputs=lambda *_, same=tensors: same, rounds=2):
            for result, local in zip(mean, tensors, strict=True):
                assert result.shape == local.shape, kind
                assert result.isfinite().all(), kind
                assert local.any() or not result.any(), kind
            assert all(t.isfinite().all() for t in residual), kind


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_value_that_is_not_finite_is_seen_by_everybody(name, num_workers, path):
    """Everybody's mean shows it; where messages can be told apart, everybody names their senders instead."""

    def work(peers, value):
        tensors = tensors_of(peers.rank)
        if peers.rank == 1:
            tensors[0][3, 4] = value
        try:
            mean, _ = CONFIGS[name].average(tensors, {}, peers)
            return "shown" if not mean[0].isfinite().all() else "hidden"
        except NotFinite as error:
            return error.ranks

    expected = "shown" if name in ("fp32", "lowrank", "lowrank-adaptive") else [1]  # those all-reduce
    for value in (torch.nan, torch.inf, -torch.inf):
        seen = run_workers(functools.partial(work, value=value), num_workers)
        assert seen == [expected] * num_workers, value


@pytest.mark.parametrize("num_workers", [2, 5])
def test_identity_26_gathering_quantises_once(num_workers):
    """|error of the mean| <= mean of half steps, where messages are gathered; two shots add one more half step."""
    codec = Quantize(8, block=64, scale_bits=32)
    inputs = [torch.randn(64, generator=torch.Generator().manual_seed(rank)) for rank in range(num_workers)]
    mean = average(codec, num_workers, inputs=lambda rank, round_: [inputs[rank]])[0][0][0]
    half_step = sum(x.abs().max() / 127 / 2 for x in inputs) / num_workers
    if num_workers > 2:
        half_step += mean.abs().max() / 127 / 2
    assert (mean - torch.stack(inputs).mean(0)).abs().max() <= half_step * (1 + 1e-5)
