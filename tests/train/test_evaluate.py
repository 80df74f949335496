"""Evaluation is a mean over samples and leaves no trace."""

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
    assert evaluate(Mean(), [{"x": samples[:4]}, {"x": samples[4:]}]) == pytest.approx(samples.mean().item())


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = Mean().train(training)
    before = torch.get_rng_state()
    evaluate(model, [{"x": torch.ones(2)}])
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), before)
