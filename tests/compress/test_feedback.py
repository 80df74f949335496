import copy

import pytest
import torch

from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.momentum import SharedMomentum
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK

from .conftest import run_workers

INNER = [TopK(4, 64, Cast()), Quantize(2), DCT(TopK(4, 64, Cast()), tile=8), LowRank(1, factors=Quantize(8, block=8))]


def gradient(rank: int, round_: int) -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * rank + round_))


@pytest.mark.parametrize("compressor", INNER, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("weights", [[1.0], [0.3, 0.7], [0.2, 0.5, 0.3]], ids=len)
def test_identity_30_nothing_is_lost(compressor, decay, weights):
    """New residual + sent = decay * old residual + gradient, round by round, in the weighted mean over workers."""
    rounds = 6

    def work(peers):
        state, history = {}, []
        for round_ in range(rounds):
            (mean,), _ = ErrorFeedback(compressor, decay).average([gradient(peers.rank, round_)], state, peers)
            history.append((mean, state["residual"][0]))
        return history

    results = run_workers(work, len(weights), weights)
    old = torch.zeros(16, 16)
    for round_ in range(rounds):
        mean = results[0][round_][0]
        residual = sum(w * history[round_][1] for w, history in zip(weights, results, strict=True))
        given = sum(w * gradient(rank, round_) for rank, w in enumerate(weights))
        torch.testing.assert_close(residual + mean, decay * old + given, rtol=0, atol=1e-5)
        old = residual


@pytest.mark.parametrize("inner", [Cast(), TopK(64, 64, Cast())], ids=str)
def test_identity_31_a_lossless_compressor_leaves_no_residual(inner):
    """With everything kept, SparseLoCo is parameter averaging for any decay."""

    def work(peers):
        state = {}
        for round_ in range(3):
            (mean,), (residual,) = ErrorFeedback(inner, 0.7).average([gradient(peers.rank, round_)], state, peers)
        return mean, residual

    expected = (gradient(0, 2) + gradient(1, 2)) / 2
    for mean, residual in run_workers(work, 2):
        torch.testing.assert_close(mean, expected)
        assert not residual.any()


@pytest.mark.parametrize("outer", [ErrorFeedback, SharedMomentum])
@pytest.mark.parametrize("compressor", [*INNER, ErrorFeedback(Quantize(4, rounding="stochastic"))], ids=str)
def test_identity_30_an_aborted_round_leaves_the_state_untouched(outer, compressor):
    """The caller's shallow copy takes all changes, also those of the dicts inside."""

    def work(peers):
        state = {}
        outer(compressor, 0.9).average([gradient(peers.rank, 0)], state, peers)
        before = copy.deepcopy(state)
        aborted, repeated = dict(state), dict(state)
        first = outer(compressor, 0.9).average([gradient(peers.rank, 1)], aborted, peers)
        assert str(state) == str(before)
        second = outer(compressor, 0.9).average([gradient(peers.rank, 1)], repeated, peers)
        return torch.equal(first[0][0], second[0][0]) and str(aborted) == str(repeated)

    assert all(run_workers(work, 2))


def test_replicated_follows_the_compressor_inside():
    assert ErrorFeedback(Cast()).replicated
    assert not ErrorFeedback(SharedMomentum(Cast())).replicated
    assert LowRank(1).replicated
    assert not LowRank(1, factors=SharedMomentum(Cast())).replicated
