import torch

from isthmus.compress.cast import Cast
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.momentum import SharedMomentum
from isthmus.compress.topk import TopK

from .conftest import run_workers

ALL = DCT(TopK(64, 64, Cast()), tile=8)
SOME = DCT(TopK(4, 64, Cast()), tile=8)


def gradient(rank: int, round_: int) -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * rank + round_))


def test_the_literal_update_line_by_line():
    """m <- decay * m + g; m <- m - q + mean(q); result g + decay * m (reconstructed from arXiv 2510.03371)."""
    decay = 0.9

    def work(peers):
        state, results, m = {}, [], torch.zeros(16, 16)
        for round_ in range(4):
            g = gradient(peers.rank, round_)
            (result,), _ = SharedMomentum(SOME, decay).average([g], state, peers)
            m = decay * m + g
            ((q_mean,), (unsent,)) = SOME.average([m], {}, peers)
            m = unsent + q_mean
            results.append((result, g + decay * m))
        return results

    for results in run_workers(work, 3):
        for actual, expected in results:
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_identity_31_all_coefficients_and_equal_gradients_are_nesterov():
    """With k = all and g the mean, the update is DiLoCo's: torch's own Nesterov is the reference."""
    param = torch.nn.Parameter(torch.zeros(16, 16))
    nesterov = torch.optim.SGD([param], lr=0.5, momentum=0.9, nesterov=True)

    def work(peers):
        state, position = {}, torch.zeros(16, 16)
        for round_ in range(5):
            (result,), _ = SharedMomentum(ALL, 0.9).average([gradient(0, round_)], state, peers)
            position -= 0.5 * result
        return position

    for round_ in range(5):
        param.grad = gradient(0, round_)
        nesterov.step()
    for position in run_workers(work, 2):
        torch.testing.assert_close(position, param.detach(), rtol=0, atol=1e-4)


def test_identity_31_the_safe_variant_with_all_coefficients_is_plain_averaging():
    """For any decay: under an outer Nesterov optimizer that is DiLoCo."""

    def work(peers):
        state = {}
        for round_ in range(3):
            (mean,), _ = ErrorFeedback(ALL, 0.8).average([gradient(peers.rank, round_)], state, peers)
        return mean

    expected = (gradient(0, 2) + gradient(1, 2)) / 2
    torch.testing.assert_close(run_workers(work, 2)[0], expected, rtol=0, atol=1e-5)


def test_workers_differ_and_momentum_is_conserved():
    """mean m' = decay * mean m + mean g whatever is sent: sharing moves momentum about, it does not lose any."""

    def work(peers):
        state = {}
        result = SharedMomentum(SOME, 0.9).average([gradient(peers.rank, 0)], state, peers)[0][0]
        return result, state["momentum"][0]

    (result_a, m_a), (result_b, m_b) = run_workers(work, 2)
    assert not SharedMomentum(SOME).replicated
    assert not torch.allclose(result_a, result_b)
    torch.testing.assert_close(m_a + m_b, gradient(0, 0) + gradient(1, 0), rtol=0, atol=1e-5)
