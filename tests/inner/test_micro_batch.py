"""The fastest micro-batch is found by trying, and trying leaves nothing behind."""

import time

import pytest
import torch
from torch import nn

from isthmus.core import UserError
from isthmus.inner import AdamW, SupervisedStep
from isthmus.inner.micro_batch import find_fastest, measure_rates
from isthmus.tools.live_bytes import LiveBytes, LiveBytesMode


class Slow(nn.Module):
    """Takes as long as it is told; what it holds shows whether it was used."""

    def __init__(self, seconds: dict[int, float], largest: int = 1000) -> None:
        super().__init__()
        self.norm, self.dropout, self.head = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)
        self.seconds, self.largest, self.sizes = seconds, largest, list[int]()

    def forward(self, batch):
        size = len(batch["x"])
        self.sizes.append(size)
        if size > self.largest:
            raise torch.OutOfMemoryError("too large")
        time.sleep(self.seconds.get(size, 0.1))
        hidden = self.norm(batch["x"]) if size > 1 else batch["x"]
        return self.head(self.dropout(hidden)).square().mean()


def make(model: Slow) -> SupervisedStep:
    return SupervisedStep(model, AdamW().build(model))


BATCH = {"x": torch.randn(12, 3)}


def test_the_fastest_is_not_the_largest():
    model = Slow({1: 0.03, 2: 0.03, 4: 0.03, 8: 0.2, 12: 0.3})
    assert find_fastest(make(model), BATCH) == 4
    assert sorted(set(model.sizes)) == [1, 2, 4, 8, 12]


def test_what_does_not_fit_ends_the_search():
    model = Slow({1: 0.03, 2: 0.03, 4: 0.03}, largest=4)
    assert find_fastest(make(model), BATCH) == 4
    assert max(model.sizes) == 8


def test_trying_takes_the_memory_of_a_step_that_has_optimizer_state():
    model = nn.Linear(64, 64)
    model.forward = lambda batch: nn.functional.linear(batch["x"], model.weight, model.bias).square().mean()
    step, batch = SupervisedStep(model, AdamW().build(model)), {"x": torch.randn(4, 64)}

    def peak(work):
        live = LiveBytes()
        live.add(
            [*model.parameters(), *(tensor for state in step.optimizer.state.values() for tensor in state.values())]
        )
        with LiveBytesMode(live):
            work()
        return live.peak

    when_tried = peak(lambda: find_fastest(step, batch))
    step(batch)
    assert when_tried >= peak(lambda: step.forward_backward(batch))


def test_when_nothing_fits_it_is_one_line():
    with pytest.raises(UserError, match="not even one sample fits"):
        find_fastest(make(Slow({}, largest=0)), BATCH)


def test_nothing_is_left_behind():
    model = Slow({})
    step = make(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_fastest(step, BATCH)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert not step.optimizer.state
    assert (step.progress, step.skipped_steps) == (0, 0)


def test_a_size_that_the_model_refuses_is_passed_over():
    """Batch norm wants more than one value a channel."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

        def forward(self, batch):
            return self.net(batch["x"]).square().mean()

    step = SupervisedStep(model := Normed(), AdamW().build(model))
    assert list(measure_rates(step, BATCH)) == [2, 4, 8, 12]
    with pytest.raises(ValueError, match="more than 1 value"):
        measure_rates(step, {"x": BATCH["x"][:1]})
