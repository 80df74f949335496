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
        gather = peers.all_gather
        peers.all_gather = lambda tensors: calls.append(sum(t.numel() for t in tensors)) or gather(tensors)
        codec = Cast("bfloat16")
        LowRank(2, codec, codec).average([matrix(9), torch.ones(5), torch.ones(20, 3, 10), torch.ones(2, 2)], {}, peers)

    run_workers(work, 1)
    assert calls == [2 * 2 * (30 + 20), 2 * 2 * (40 + 30), 2 * (5 + 4)]  # P, Q, what does not shrink: bytes


@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (24, 8, 12)])
def test_a_workers_own_noise_leaves_by_the_smaller_side(shape):
    """A quarter of 24 directions of a matrix that no other worker shares are sent, whichever side is the larger."""

    def work(peers):
        own = torch.randn(shape, generator=torch.Generator().manual_seed(peers.rank))
        (mean,), (residual,) = LowRank(6).average([own], {}, peers)
        assert mean.shape == residual.shape == own.shape
        return float(residual.square().sum() / own.square().sum())

    for rest in run_workers(work, 8):
        assert rest == pytest.approx(0.75, abs=0.05)


def test_values_that_are_not_finite_are_seen():
    bad = matrix(5)
    bad[3, 4] = torch.nan
    ((mean,), _), _ = run_workers(lambda peers: LowRank(2).average([bad], {}, peers), 2)
    assert not mean.isfinite().all()


@pytest.mark.parametrize("rank", [0, -1, 1.5, -0.25])
def test_bad_rank_is_one_clear_line(rank):
    with pytest.raises(UserError, match=f"rank {rank} must be a whole number"):
        LowRank(rank)


def test_a_rank_may_be_a_share_of_each_matrix():
    """A quarter of 48 columns hold a mean of rank 12, one of 8 columns of rank 2, one of 5 not quite that of rank 2."""
    wide, narrow, odd = matrix(12, (60, 48)), matrix(2, (30, 8)), matrix(3, (30, 5))

    def work(peers):
        state = {}
        for _ in range(20):
            means, _ = LowRank(0.25).average([wide, narrow, odd], state, peers)
        errors = torch.stack([(m - a).norm() for m, a in zip(means, (wide, narrow, odd), strict=True)])
        return [q.shape[1] for q in state["start"]], errors.tolist()

    ranks, errors = run_workers(work, 1)[0]
    assert ranks == [12, 2, 2]
    assert max(errors[:2]) < 1e-3 < errors[2]


def test_a_rank_that_is_a_share_falls_for_all_matrices_alike():
    """Means of rank 3 of 12 columns and 1 of 6: a fifth of the rank on average, and a quarter of that more."""

    def work(peers):
        compressor, state, targets = LowRank(0.25, window=1), {}, [orthogonal(3), matrix(1, (24, 24))]
        for _ in range(4):
            compressor.average(targets, state, peers)
        return [q.shape[1] for q in state["start"]], compressor.message_fraction(state)

    ranks, fraction = run_workers(work, 1)[0]
    assert fraction == 17 / 64  # 1.25 times the mean of 3 / 12 and 1 / 6, rounded up
    assert ranks == [4, 2]


def orthogonal(rank: int, size: int = 48) -> torch.Tensor:
    """All its `rank` singular values are 1: so is its effective rank `rank`."""
    left, right = (torch.linalg.qr(matrix(size, (size, size), seed)).Q[:, :rank] for seed in (5, 6))
    return left @ right.T


def adaptive(targets, num_workers: int = 2, **options):
    """Average one target after the other; every worker's ranks, and the error of every mean."""
    compressor = LowRank(rank=20, window=3, **options)

    def work(peers):
        state, seen = {}, []
        for target in targets:
            (mean,), _ = compressor.average([target], state, peers)
            seen.append((state["rank"], float((mean - target).norm()), compressor.message_fraction(state)))
        return seen

    return run_workers(work, num_workers)


def test_the_rank_comes_down_to_what_the_mean_holds_and_a_quarter_more():
    first, other = adaptive([orthogonal(4)] * 8)
    assert first == other
    assert [rank for rank, _, _ in first] == [20] + [5] * 7
    assert all(error < 1e-4 for _, error, _ in first)
    assert [message_fraction for _, _, message_fraction in first] == [1.0] + [0.25] * 7


def test_the_rank_grows_again_with_what_the_mean_holds():
    first, _ = adaptive([orthogonal(4)] * 4 + [orthogonal(12)] * 30)
    ranks = [rank for rank, _, _ in first]
    assert ranks[3] == 5
    assert ranks == ranks[:4] + sorted(ranks[4:])
    assert ranks[-1] == 15
    assert first[-1][1] < 1e-3


def test_all_take_the_rank_in_the_middle_whatever_they_remember():
    """The one that has just joined, with weight 0 and no memory, sends messages of the same size."""
    memories = [[4.0], [6.0, 8.0], [10.0], []]

    def work(peers):
        state = {"effective_ranks": memories[peers.rank]} if memories[peers.rank] else {}
        (mean,), _ = LowRank(20, window=2).average([orthogonal(3)], state, peers)
        return state["rank"], mean, state["effective_ranks"]

    results = run_workers(work, 4, [1 / 3, 1 / 3, 1 / 3, 0.0])
    assert [rank for rank, _, _ in results] == [9] * 4  # 1.25 times 7
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
    assert [len(seen) for _, _, seen in results] == [2, 2, 2, 1]


def test_a_falling_rank_keeps_the_directions_that_matter():
    """Of a mean with singular values 8, 4, 2, 1, ... two columns of the warm start span the first two directions."""
    left, right = (torch.linalg.qr(matrix(48, (48, 48), seed)).Q for seed in (5, 6))
    target = left[:, :8] @ torch.diag(2.0 ** torch.arange(3, -5, -1)) @ right[:, :8].T

    def work(peers):
        state = {}
        LowRank(8, window=1).average([target], state, peers)
        return state["start"][0][:, :2]

    (start,) = run_workers(work, 1)
    assert torch.linalg.svdvals(right[:, :2].T @ start).min() > 0.999


def test_a_mean_that_is_not_finite_leaves_the_rank_alone():
    bad = orthogonal(4)
    bad[0, 0] = torch.nan

    def work(peers):
        state = {}
        (mean,), _ = LowRank(20, window=2).average([bad], state, peers)
        return bool(mean.isfinite().all()), LowRank(20, window=2).average([bad], state, peers) and state["rank"]

    assert run_workers(work, 2) == [(False, 20)] * 2


def test_bad_window_is_one_clear_line():
    with pytest.raises(UserError, match="window -1"):
        LowRank(4, window=-1)
