"""Evaluation is a mean over samples and leaves no trace."""

import math

import pytest
import torch
from torch import nn

from isthmus.train.evaluate import evaluate


class Mean(nn.Module):
    """The mean of a batch's samples; nan while training."""

    def forward(self, batch):
        return batch["x"].mean() if not self.training else torch.tensor(torch.nan)


def test_every_sample_weighs_the_same_whatever_its_batch():
    samples = torch.arange(7.0)
    values = evaluate(Mean(), [{"x": samples[:4]}, {"x": samples[4:]}])
    assert values == {"loss": pytest.approx(samples.mean().item())}


def test_a_model_measures_what_else_is_worth_knowing():
    class Counting(Mean):
        def measure(self, batches):
            return {"above_1": (sum((batch["x"] > 1).sum().item() for batch in batches), 3), "unseen": (0, 0)}

    values = evaluate(Counting(), [{"x": torch.arange(3.0)}])
    assert math.isnan(values.pop("unseen"))
    assert values == {"loss": 1.0, "above_1": 1 / 3}


def test_what_an_evaluation_draws_is_the_same_every_time():
    class Noisy(Mean):
        def forward(self, batch):
            return torch.rand(())

    assert evaluate(Noisy(), [{"x": torch.ones(2)}]) == evaluate(Noisy(), [{"x": torch.ones(2)}])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = Mean().train(training)
    before = torch.get_rng_state()
    evaluate(model, [{"x": torch.ones(2)}])
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), before)
