"""Muon against a naive version, against torch's own, and against what orthogonal means."""

import pytest
import torch
from torch import nn

from isthmus.inner import muon
from isthmus.inner.muon import Muon, orthogonalize


@pytest.fixture
def in_float32(monkeypatch):
    monkeypatch.setattr(muon, "_working_dtype", lambda device: torch.float32)


def naive_orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """One singular value at a time: the polynomial acts on them alone."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def matrices_of(*shapes: tuple[int, int], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 7)])
def test_orthogonalize_equals_its_polynomial_on_singular_values(shape):
    batch = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([naive_orthogonalize(matrix) for matrix in batch])
    torch.testing.assert_close(orthogonalize(batch).double(), expected, atol=1e-4, rtol=0)


def test_the_update_is_nearly_orthogonal():
    values = torch.linalg.svdvals(orthogonalize(torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.68
    assert values.max() < 1.21


def test_zero_and_rank_one_gradients_stay_finite():
    assert orthogonalize(torch.zeros(1, 8, 8)).abs().max() == 0
    ones = orthogonalize(torch.ones(1, 8, 8), torch.bfloat16)
    assert torch.linalg.svdvals(ones.float())[0, 0] == pytest.approx(1, abs=0.35)


def test_step_equals_the_naive_version(in_float32):
    """Wide, tall and square, batched together, over several steps with decay."""
    shapes = [(8, 24), (24, 8), (8, 8), (8, 24)]
    params = matrices_of(*shapes)
    weights = [param.detach().double() for param in params]
    momenta = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    optimizer = Muon(params, lr=0.1, momentum=0.9, weight_decay=0.5)
    for step in range(5):
        for i, grad in enumerate(matrices_of(*shapes, seed=100 + step)):
            params[i].grad = grad.detach()
            momenta[i] = 0.9 * momenta[i] + 0.1 * grad.detach()
            direction = naive_orthogonalize(0.9 * momenta[i] + 0.1 * grad.detach())
            weights[i] = weights[i] * (1 - 0.1 * 0.5) - 0.1 * 0.2 * max(shapes[i]) ** 0.5 * direction
        optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, atol=1e-4, rtol=0)


def test_step_equals_torch_muon():
    """The same algorithm; torch computes in bfloat16, whose rounding (2^-8) five steps of degree five amplify."""
    ours, theirs = matrices_of((16, 48), (48, 16)), matrices_of((16, 48), (48, 16))
    optimizers = [
        Muon(ours, lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    start = [param.detach().clone() for param in ours]
    for step in range(3):
        for params in (ours, theirs):
            for param, grad in zip(params, matrices_of((16, 48), (48, 16), seed=step + 1), strict=True):
                param.grad = grad.detach()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, begin in zip(ours, theirs, start, strict=True):
        moved = (b - begin).norm()
        assert (a - b).norm() < 0.02 * moved


def test_update_has_the_size_of_adamws(in_float32):
    for shape in ((32, 32), (32, 128), (128, 32)):
        (param,) = matrices_of(shape)
        before = param.detach().clone()
        param.grad = matrices_of(shape, seed=1)[0].detach()
        Muon([param], lr=1.0, weight_decay=0.0).step()
        assert (param.detach() - before).square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_batches_are_bounded(in_float32, monkeypatch):
    """Many small batches give what one large batch gives."""
    results = []
    for limit in (2**24, 2 * 8 * 24):
        monkeypatch.setattr(muon, "_BATCH_ELEMENTS", limit)
        params = matrices_of(*[(8, 24)] * 5)
        for param, grad in zip(params, matrices_of(*[(8, 24)] * 5, seed=1), strict=True):
            param.grad = grad.detach()
        Muon(params).step()
        results.append(torch.stack([param.detach() for param in params]))
    torch.testing.assert_close(*results)


def test_matrices_without_gradient_stay():
    params = matrices_of((4, 8), (4, 8))
    params[0].grad = torch.randn(4, 8)
    untouched = params[1].detach().clone()
    Muon(params).step()
    assert torch.equal(params[1], untouched)


def test_filters_are_matrices_of_out_by_all_the_rest(in_float32):
    """Of images and of sound, wide and tall, beside matrices of the same size: bit for bit the matrices' update."""
    shapes = [(8, 3, 3, 3), (24, 2, 3), (27, 8), (8, 27), (16, 8, 1, 1)]
    filters = [nn.Parameter(matrix.detach().clone()) for matrix in matrices_of(*shapes)]
    matrices = [nn.Parameter(matrix.detach().flatten(1).clone()) for matrix in filters]
    optimizers = [Muon(filters), Muon(matrices)]
    for step in range(3):
        for param, matrix, grad in zip(filters, matrices, matrices_of(*shapes, seed=step + 1), strict=True):
            param.grad, matrix.grad = grad.detach(), grad.detach().flatten(1)
        for optimizer in optimizers:
            optimizer.step()
    for param, matrix, start in zip(filters, matrices, matrices_of(*shapes), strict=True):
        assert torch.equal(param.flatten(1), matrix)
        assert not torch.equal(param, start)
