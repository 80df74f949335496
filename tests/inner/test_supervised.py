"""The training step against the same written out by hand."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isthmus.core import UserError
from isthmus.inner import Cosine, SupervisedStep


class Regression(nn.Module):
    """Mean squared error of a small network; a batch entry "scale" can make its loss overflow."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        self.sizes: list[int] = []

    def forward(self, batch):
        self.sizes.append(len(batch["x"]))
        loss = (self.layers(batch["x"]).squeeze(1) - batch["y"]).square().mean()
        return loss * batch["scale"].mean() if "scale" in batch else loss


def batch_of(size: int, seed: int = 0, dtype: torch.dtype = torch.float32, **more: torch.Tensor):
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {"x": x, "y": x.sum(1).sin(), **more}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@pytest.mark.parametrize("micro_batch_size", [1, 3, 7, 100])
def test_accumulation_equals_the_whole_batch(micro_batch_size):
    """Exact in float64, the last micro-batch (7 = 3 + 3 + 1) included."""
    whole, parts = Regression(torch.float64), Regression(torch.float64)
    by_hand = sgd(whole)
    step = SupervisedStep(parts, sgd(parts), micro_batch_size=micro_batch_size, clip_norm=None)
    for seed in range(5):
        batch = batch_of(7, seed, torch.float64)
        by_hand.zero_grad()
        loss = whole(batch)
        loss.backward()
        by_hand.step()
        assert step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(weights(parts), weights(whole), atol=1e-13, rtol=1e-12)
    assert max(parts.sizes) == min(micro_batch_size, 7)


def test_clipping_is_of_the_whole_batch():
    whole, parts = Regression(), Regression()
    by_hand = sgd(whole)
    step = SupervisedStep(parts, sgd(parts), micro_batch_size=3, clip_norm=0.05)
    for seed in range(3):
        by_hand.zero_grad()
        whole(batch_of(7, seed)).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        assert norm > 0.05
        by_hand.step()
        assert step(batch_of(7, seed))["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(weights(parts), weights(whole))


def test_a_small_gradient_is_not_clipped():
    clipped, free = Regression(), Regression()
    SupervisedStep(clipped, sgd(clipped), clip_norm=1e6)(batch_of(7))
    SupervisedStep(free, sgd(free), clip_norm=None)(batch_of(7))
    assert torch.equal(weights(clipped), weights(free))


def test_learning_rates_follow_the_progress_of_the_run():
    model = Regression()
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.2, 0.1, 0.1), strict=True)]
    optimizer = torch.optim.SGD(groups)
    schedule = Cosine().over(100)
    step = SupervisedStep(model, optimizer, schedule)
    assert [step(batch_of(4))["lr"] for _ in range(3)] == pytest.approx([0.1 * schedule(i) for i in range(3)])
    step.set_progress(60)
    step(batch_of(4))
    assert [group["lr"] for group in optimizer.param_groups][:2] == pytest.approx(
        [0.1 * schedule(60), 0.2 * schedule(60)]
    )
    assert step.progress == 61


@pytest.mark.parametrize("scale", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_loss_that_is_not_finite_skips_the_step(scale, precision):
    """Weights and optimizer stay bit for bit; the step counts; the next one trains."""
    model = Regression()
    step = SupervisedStep(model, sgd(model), micro_batch_size=2, precision=precision)
    step(batch_of(6))
    before = weights(model)
    momentum = [state["momentum_buffer"].clone() for state in step.optimizer.state.values()]
    bad = torch.ones(6)
    bad[2] = scale  # one sample of the second micro-batch
    metrics = step(batch_of(6, scale=bad))
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["loss"])
    assert torch.equal(weights(model), before)
    assert all(
        torch.equal(a, b["momentum_buffer"]) for a, b in zip(momentum, step.optimizer.state.values(), strict=True)
    )
    assert step(batch_of(6))["skipped"] == 0.0
    assert not torch.equal(weights(model), before)
    assert (step.progress, step.skipped_steps) == (3, 1)


class InfiniteLoss(nn.Module):
    """An infinite loss whose gradient is finite, as cross-entropy gives for an impossible target."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, batch):
        return self.weight.sum() + batch["x"].mean()


def test_an_infinite_loss_with_a_finite_gradient_skips_too():
    model = InfiniteLoss()
    step = SupervisedStep(model, sgd(model))
    assert step({"x": torch.tensor([math.inf])})["skipped"] == 1.0
    assert torch.equal(model.weight.detach(), torch.zeros(3))


def test_a_skipped_step_leaves_running_statistics_alone():
    """One image that is not finite would otherwise make them nan for ever, and every sync after it be refused."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    forward, model.forward = model.forward, lambda batch: forward(batch["x"]).square().mean()
    step = SupervisedStep(model, sgd(model), micro_batch_size=2)
    step(batch_of(6))
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    bad = batch_of(6, seed=1)
    bad["x"][2, 0] = math.nan
    assert step(bad)["skipped"] == 1.0
    assert all(torch.equal(model.get_buffer(name), buffer) for name, buffer in before.items())
    assert step(batch_of(6, seed=2))["skipped"] == 0.0
    assert not any(torch.equal(model.get_buffer(name), buffer) for name, buffer in before.items())


def test_float16_overflow_lowers_the_scale_and_counts():
    """The scale starts at 2^16: a loss of 1000 overflows until it has been halved often enough."""
    model = Regression()
    step = SupervisedStep(model, sgd(model, lr=1e-6), precision="float16")
    skipped = [step(batch_of(4, scale=torch.full((4,), 1000.0)))["skipped"] for _ in range(20)]
    assert skipped[0] == 1.0
    assert skipped[-1] == 0.0
    assert sorted(skipped, reverse=True) == skipped
    assert step.progress == 20
    assert step.state_dict()["scaler"]["scale"] == 2.0 ** (16 - sum(skipped))


@pytest.mark.parametrize(("precision", "digits"), [("bfloat16", 8), ("float16", 11)])
def test_autocast_rounds_the_forward_pass_and_leaves_weights_float32(precision, digits):
    exact, rounded = Regression(), Regression()
    reference = SupervisedStep(exact, sgd(exact))(batch_of(64))
    step = SupervisedStep(rounded, sgd(rounded), precision=precision)
    metrics = step(batch_of(64))
    assert metrics["loss"] == pytest.approx(reference["loss"], rel=8 * 2.0**-digits)
    assert metrics["loss"] != reference["loss"]
    assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=8 * 2.0**-digits)  # unscaled
    assert {param.dtype for param in rounded.parameters()} == {torch.float32}


def test_saved_state_continues_bit_for_bit_with_its_loss_scale():
    def trained(model: nn.Module, seeds: range, saved=None) -> SupervisedStep:
        step = SupervisedStep(model, sgd(model, lr=1e-4), Cosine().over(40), precision="float16")
        if saved is not None:
            step.load_state_dict(saved)
        for seed in seeds:
            step(batch_of(4, seed, scale=torch.full((4,), 1000.0)))
        return step

    straight, resumed = Regression(), Regression()
    expected = trained(straight, range(24))
    saved = copy.deepcopy(trained(resumed, range(12)).state_dict())
    continued = trained(resumed, range(12, 24), saved)
    assert torch.equal(weights(resumed), weights(straight))
    assert (continued.progress, continued.skipped_steps) == (24, expected.skipped_steps)
    assert continued.state_dict()["scaler"] == expected.state_dict()["scaler"]
    assert expected.skipped_steps > 0


class Line(nn.Module):
    """Small enough to compile in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, batch):
        return (batch["x"] @ self.weight - batch["y"]).square().mean()


@pytest.mark.processes
def test_compiled_model_trains_alike():
    plain, compiled = Line(), Line()
    reference = SupervisedStep(plain, sgd(plain))
    step = SupervisedStep(compiled, sgd(compiled), compile=True)
    losses = [step(batch_of(4, seed))["loss"] for seed in range(3)]
    assert losses == pytest.approx([reference(batch_of(4, seed))["loss"] for seed in range(3)], rel=1e-5)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_reduces_once_a_batch(process_group):
    """Real DDP, its reductions counted by a communication hook."""
    plain, model = Regression(), Regression()
    ddp = nn.parallel.DistributedDataParallel(model)
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, count)
    step = SupervisedStep(ddp, sgd(model), micro_batch_size=2)
    reference = SupervisedStep(plain, sgd(plain), micro_batch_size=2)
    for seed in range(3):
        step(batch_of(7, seed))
        reference(batch_of(7, seed))
    assert len(reductions) == 3
    torch.testing.assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("bad", [{"micro_batch_size": 0}, {"clip_norm": 0.0}])
def test_bad_values_are_refused(bad):
    model = Regression()
    with pytest.raises(UserError, match=next(iter(bad))):
        SupervisedStep(model, sgd(model), **bad)
