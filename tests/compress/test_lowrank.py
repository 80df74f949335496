import pytest
import torch

from isthmus.compress.cast import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.core.types import UserError

from .conftest import run_workers


def matrix(rank: int, shape: tuple[int, int] = (40, 30), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(shape[0], rank, generator=generator)
    return left @ torch.randn(rank, shape[1], generator=generator) / rank


def test_identity_29_exact_where_the_mean_has_that_rank():
    """Two workers of rank 1 each: their mean has rank 2."""

    def work(peers):
        (mean,), (residual,) = LowRank(2).average([matrix(1, seed=peers.rank)], {}, peers)
        return mean, residual

    expected = (matrix(1, seed=0) + matrix(1, seed=1)) / 2
    for mean, residual in run_workers(work, 2):
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(residual, torch.zeros_like(residual), rtol=0, atol=1e-5)


def test_identity_29_full_rank_goes_around_exactly():
    def work(peers):
        return LowRank(30, bypass=Cast()).average([matrix(30)], {}, peers)

    ((mean,), (residual,)), _ = run_workers(work, 2)
    torch.testing.assert_close(mean, matrix(30))
    assert not residual.any()


def test_identity_29_linear_given_the_same_start():
    """What two workers average is what one worker makes of their mean."""
    inputs = [matrix(20, seed=rank) for rank in range(2)]

    def work(peers):
        own = inputs[peers.rank] if peers.size == 2 else sum(inputs) / 2
        return LowRank(3).average([own], {}, peers)[0][0]

    two, one = run_workers(work, 2), run_workers(work, 1)
    torch.testing.assert_close(two[0], one[0], rtol=0, atol=1e-5)


def test_warm_start_converges_to_the_best_low_rank_matrix():
    target = matrix(20, seed=3)
    best = torch.linalg.svdvals(target)[4:].square().sum().sqrt()

    def work(peers):
        state, errors = {}, []
        for _ in range(15):
            (mean,), _ = LowRank(4).average([target], state, peers)
            errors.append((mean - target).norm() / best)
        return errors

    (errors,) = run_workers(work, 1)
    assert errors[0] > 1.1
    assert errors[-1] < 1.01


def test_rank_and_shape_may_change_and_all_workers_stay_equal():
    def work(peers):
        state, means = {}, []
        for rank, shape in [(2, (40, 30)), (2, (40, 30)), (4, (40, 30)), (4, (20, 50))]:
            compressor = ErrorFeedback(LowRank(rank, factors=Quantize(8, block=16)))
            if means and means[-1].shape != shape:
                state.pop("residual")
            means += compressor.average([matrix(10, shape, seed=peers.rank)], state, peers)[0]
        return means, state["compressor"]["start"][0]

    first, *others = run_workers(work, 3)
    assert first[1].shape == (50, 4)
    for means, start in others:
        assert all(torch.equal(a, b) for a, b in zip(means, first[0], strict=True))
        assert torch.equal(start, first[1])


def test_two_rounds_for_all_matrices_and_one_for_the_rest():
    calls = []

    def work(peers):
        gather = peers.gather
        peers.gather = lambda tensors: calls.append(sum(t.numel() for t in tensors)) or gather(tensors)
        codec = Cast("bfloat16")
        LowRank(2, codec, codec).average([matrix(9), torch.ones(5), torch.ones(20, 3, 10), torch.ones(2, 2)], {}, peers)

    run_workers(work, 1)
    assert calls == [2 * 2 * (40 + 20), 2 * 2 * (30 + 30), 2 * (5 + 4)]  # P, Q, what does not shrink: bytes


def test_values_that_are_not_finite_are_seen():
    bad = matrix(5)
    bad[3, 4] = torch.nan
    ((mean,), _), _ = run_workers(lambda peers: LowRank(2).average([bad], {}, peers), 2)
    assert not mean.isfinite().all()


def test_bad_rank_is_one_clear_line():
    with pytest.raises(UserError, match="rank 0"):
        LowRank(0)
