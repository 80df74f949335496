"""Robust means: identities 39 and 40, and what one bad worker of several can do."""

from dataclasses import replace

import pytest
import torch

from isthmus.compress.base import NotFinite
from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.robust import CentredClip, Median, NormClip, RobustMean, TrimmedMean, aggregate
from isthmus.compress.topk import TopK
from isthmus.core.types import Tensors, UserError

from .conftest import run_workers
from .test_contract import CONFIGS, ROBUST

NEUTRAL = {
    "trimmed": TrimmedMean(trim=0),
    "norm-clip": NormClip(factor=float("inf")),
    "centred-clip": CentredClip(factor=float("inf"), iterations=1),
}
RULES = {"median": Median(), "trimmed": TrimmedMean(), "norm-clip": NormClip(), "centred-clip": CentredClip()}
SHAPES = [(9, 7), (5,), (), (0, 3), (130,)]
BAD = {"large": 1e6, "negative": -1e6, "larger": 1e15, "huge": 3e38, "nan": torch.nan, "infinite": torch.inf}


def honest(rank: int) -> Tensors:
    """Around 1, so that zero would be noticed, too."""
    generator = torch.Generator().manual_seed(rank)
    return [1 + 0.1 * torch.randn(shape, generator=generator) for shape in SHAPES]


def means(rule: RobustMean, inputs: list[Tensors], weights: list[float] | None = None) -> list[Tensors]:
    """Everybody's mean of these inputs, equal bits."""

    def work(peers):
        return rule.average(inputs[peers.rank], {}, peers)[0]

    results = run_workers(work, len(inputs), weights)
    for mean in results:
        assert all(torch.equal(a, b) for a, b in zip(mean, results[0], strict=True))
    return results[0]


def column(inputs: list[Tensors], index: int) -> torch.Tensor:
    """[workers, ...] of one tensor."""
    return torch.stack([tensors[index] for tensors in inputs])


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_identity_39_neutral_parameters_give_the_plain_mean(name, num_workers):
    inputs = [honest(rank) for rank in range(num_workers)]
    for index, mean in enumerate(means(NEUTRAL[name], inputs)):
        torch.testing.assert_close(mean, column(inputs, index).mean(0))


@pytest.mark.parametrize("name", ["norm-clip", "centred-clip"])
def test_identity_39_neutral_parameters_respect_weights(name):
    inputs, weights = [honest(rank) for rank in range(3)], torch.tensor([0.2, 0.5, 0.3])
    for index, mean in enumerate(means(NEUTRAL[name], inputs, weights.tolist())):
        torch.testing.assert_close(mean, torch.tensordot(weights, column(inputs, index), 1))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_workers_that_agree_are_not_changed(name, num_workers):
    for mean, tensor in zip(means(RULES[name], [honest(0)] * num_workers), honest(0), strict=True):
        torch.testing.assert_close(mean, tensor, rtol=1e-6, atol=0)


def test_identity_39_median_of_two_is_the_mean_and_of_many_the_middle():
    for num_workers in (2, 3, 4, 7):
        inputs = [honest(rank) for rank in range(num_workers)]
        for index, mean in enumerate(means(Median(), inputs)):
            values = column(inputs, index).sort(0).values
            torch.testing.assert_close(mean, (values[(num_workers - 1) // 2] + values[num_workers // 2]) / 2)


def test_trimmed_mean_is_the_naive_one_and_with_few_workers_the_median():
    inputs = [honest(rank) for rank in range(7)]
    for index, mean in enumerate(means(TrimmedMean(trim=2), inputs)):
        torch.testing.assert_close(mean, column(inputs, index).sort(0).values[2:5].mean(0))
    few = inputs[:4]
    assert all(torch.equal(a, b) for a, b in zip(means(TrimmedMean(trim=2), few), means(Median(), few), strict=True))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spoilt", [0, 3])
def test_one_bad_worker_of_four_cannot_move_the_result_out_of_the_honest_range(name, bad, spoilt):
    inputs = [honest(rank) for rank in range(4)]
    others = [tensors for rank, tensors in enumerate(inputs) if rank != spoilt]
    inputs[spoilt] = [torch.full_like(tensor, BAD[bad]) for tensor in inputs[spoilt]]
    for index, mean in enumerate(means(RULES[name], inputs)):
        column_ = column(others, index)
        # a clipped message still counts, with an honest one's length: norm_clip keeps 3/4 of the honest mean
        slack = {"norm-clip": 0.6, "centred-clip": 0.15}.get(name, 0.0)
        assert (mean >= column_.amin(0) - slack).all()
        assert (mean <= column_.amax(0) + slack).all()


def test_one_bad_worker_moves_the_plain_mean_anywhere():
    """Else the test above could not fail."""
    inputs = [honest(0), honest(1), honest(2), [torch.full(shape, 1e6) for shape in SHAPES]]
    results = run_workers(lambda peers: Cast("bfloat16").average(inputs[peers.rank], {}, peers)[0], 4)
    assert results[0][0].min() > 1e5


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_identity_39_one_value_that_is_not_finite_leaves_the_result_of_the_others(name, value):
    inputs = [honest(rank) for rank in range(4)]
    inputs[2][0][3, 4] = value
    with_it = means(RULES[name], inputs)
    without = means(RULES[name], [inputs[0], inputs[1], inputs[3]])
    for a, b in zip(with_it, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["norm-clip", "centred-clip"])
def test_rules_do_not_depend_on_the_scale(name):
    inputs = [honest(rank) for rank in range(4)]
    inputs[1] = [7 * tensor for tensor in inputs[1]]
    scaled = means(RULES[name], [[1024 * tensor for tensor in tensors] for tensors in inputs])
    for a, b in zip(scaled, means(RULES[name], inputs), strict=True):
        torch.testing.assert_close(a, 1024 * b)


def test_identity_40_one_worker_moves_the_norm_clipped_mean_by_at_most_twice_its_share():
    inputs, largest = [honest(rank) for rank in range(4)], 0.0
    before = torch.cat([tensor.flatten() for tensor in means(NormClip(), inputs)])
    limit = sorted(torch.cat([t.flatten() for t in tensors]).norm() for tensors in inputs)[2]  # 3 honest: at most this
    for factor in (-1e6, -1.0, 0.0, 1e6):
        inputs[3] = [factor * tensor for tensor in honest(3)]
        after = torch.cat([tensor.flatten() for tensor in means(NormClip(), inputs)])
        largest = max(largest, float((after - before).norm()))
    assert 0.4 * limit < largest <= 2 / 4 * limit * (1 + 1e-5)


def test_nobody_finite_names_everybody():
    def work(peers):
        with pytest.raises(NotFinite, match="workers 0, 2"):
            Median().average([torch.full((4,), torch.nan)], {}, peers)

    run_workers(work, 3, [0.5, 0.0, 0.5])


def test_two_shots_and_eight_bytes_a_worker_and_owner():
    num_workers, values = 4, 400

    def work(peers):
        Median(Cast("float16")).average([torch.ones(values)], {}, peers)
        return peers.sent_bytes

    payload = 2 * values * 2 * (num_workers - 1) // num_workers  # identity 35
    assert run_workers(work, num_workers) == [payload + (num_workers - 1) * num_workers * 8] * num_workers


def test_error_feedback_remembers_what_the_codec_did_not_write():
    tensor = torch.linspace(-1, 1, 64)

    def work(peers):
        state = {}
        ErrorFeedback(Median(Quantize(4, block=32))).average([tensor], state, peers)
        return state["residual"][0]

    message = Quantize(4, block=32).decode(Quantize(4, block=32).encode(tensor.view(-1, 32))).flatten()
    for residual in run_workers(work, 3):
        torch.testing.assert_close(residual, tensor - message)


@pytest.mark.parametrize("codec", [LowRank(2), ErrorFeedback(Cast())], ids=lambda c: type(c))
@pytest.mark.parametrize("rule", [Median, TrimmedMean, NormClip, CentredClip])
def test_only_codecs(rule, codec):
    with pytest.raises(UserError, match="a robust mean needs a codec"):
        rule(codec)


SPARSE = {"topk": TopK(keep=4, chunk=32, values=Cast()), "dct-topk": DCT(TopK(keep=8, chunk=64, values=Cast()), tile=8)}


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("name", RULES)
def test_sparse_messages_go_to_everybody_for_the_bytes_of_the_plain_mean_and_some_norms(name, codec):
    inputs = [honest(rank) for rank in range(4)]

    def work(peers):
        mean, residual = replace(RULES[name], codec=SPARSE[codec]).average(inputs[peers.rank], {}, peers)
        return mean, [a - b for a, b in zip(inputs[peers.rank], residual, strict=True)], peers.sent_bytes

    def plain(peers):
        SPARSE[codec].average(inputs[peers.rank], {}, peers)
        return peers.sent_bytes

    num_norms = 1 + getattr(RULES[name], "iterations", 0)
    results, (plain_bytes, *_) = run_workers(work, 4), run_workers(plain, 4)
    rows = torch.stack([SPARSE[codec].to_rows(message) for _, message, _ in results])
    if name == "median" and codec == "topk":  # whose rows are the values themselves
        expected = rows.sort(0).values[1:3].mean(0)
        torch.testing.assert_close(SPARSE[codec].to_rows(results[0][0]), expected, rtol=0, atol=2e-6)
    for mean, _, sent_bytes in results:
        assert all(torch.equal(a, b) for a, b in zip(mean, results[0][0], strict=True))
        assert sent_bytes == plain_bytes + num_norms * 3 * 4 * 8


def test_clipped_sparse_messages_still_move_the_anchor_where_workers_choose_other_values():
    """A median of mostly silent workers is zero; rules that clip whole messages are not."""
    inputs = [[torch.zeros(64)] for _ in range(4)]
    for rank in range(4):
        inputs[rank][0][16 * rank : 16 * rank + 4] = 1.0
    for name, rule in RULES.items():
        mean = means(replace(rule, codec=TopK(keep=4, chunk=64, values=Cast())), inputs)[0]
        assert float(mean.norm()) == pytest.approx({"median": 0.0, "trimmed": 0.0}.get(name, 1.0), abs=1e-6)


AGGREGATE = [name for name, config in CONFIGS.items() if name not in ROBUST]


@pytest.mark.parametrize("huge", [1e6, 1e15, 1e30])
@pytest.mark.parametrize("rule", [None, *RULES.values()], ids=["mean", *RULES])
@pytest.mark.parametrize("name", AGGREGATE)
def test_one_worker_of_four_that_sends_huge_numbers_moves_the_result_of_no_compressor_far(name, rule, huge):
    """Its length stays that of the others' messages; with the plain mean it does not, so this test can fail."""
    compressor = CONFIGS[name] if rule is None else aggregate(CONFIGS[name], lambda codec: replace(rule, codec=codec))
    spoilt = [honest_matrices(rank) for rank in range(3)]
    spoilt.append([huge * torch.randn(t.shape, generator=torch.Generator().manual_seed(9)) for t in spoilt[0]])

    def work(peers):
        try:
            return compressor.average(spoilt[peers.rank], {}, peers)[0]
        except NotFinite:  # of the plain mean
            return [torch.full((), torch.inf)]

    longest = max(length(tensors) for tensors in spoilt[:3])
    for mean in run_workers(work, 4)[:3]:
        # the coordinates of a median may come from three workers; shared momentum counts a message twice
        assert (length(mean) <= 2 * 3**0.5 * longest) == (rule is not None)


def honest_matrices(rank: int) -> Tensors:
    """Tensors for every kind of compressor: matrices of low rank, and what is no matrix."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(40, 33), (5,), (130,), (64, 64)]
    return [1 + 0.1 * torch.randn(shape, generator=generator) for shape in shapes]


def length(tensors: Tensors) -> float:
    return float(torch.cat([tensor.flatten().double() for tensor in tensors]).norm())


class Own:
    """A compressor that is no codec and holds none."""

    def average(self, local, state, peers):
        raise NotImplementedError


@pytest.mark.parametrize(
    "compressor",
    [Own(), ErrorFeedback(Own()), Median(), ErrorFeedback(Median())],
    ids=["own", "own-inside", "robust", "robust-inside"],
)
def test_a_compressor_with_a_mean_of_its_own_is_refused_in_one_line(compressor):
    with pytest.raises(UserError, match=r"outer.aggregation: .* is no codec, and holds none"):
        aggregate(compressor, Median)


def test_bad_parameters_are_one_clear_line():
    with pytest.raises(UserError, match="trim -1"):
        TrimmedMean(trim=-1)
    with pytest.raises(UserError, match="factor 0"):
        NormClip(factor=0)
    with pytest.raises(UserError, match="iterations 0"):
        CentredClip(iterations=0)
