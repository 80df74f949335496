"""A training run saved in the middle and resumed in fresh objects, on a real model and real text."""

import io

import pytest
import torch

from isthmus.data import OrderedBatches, Text
from isthmus.inner import AdamW, Cosine, MuonAdamW, SupervisedStep
from isthmus.models.gpt_neox import GPTNeoX

STEPS = 100


@pytest.fixture(scope="module")
def data_set():
    return Text().open(sequence_length=16)


class Run:
    """Model, inner step and stream; dropout draws from the global generator."""

    def __init__(self, data_set, spec) -> None:
        self.model = GPTNeoX(16, num_layers=2, num_heads=2, sequence_length=16, dropout=0.1).build(seed=0)
        optimizer = spec.build(self.model)
        self.step = SupervisedStep(self.model, optimizer, Cosine().over(STEPS), micro_batch_size=2)
        self.stream = OrderedBatches(data_set.sample_order(), batch_size=3)

    def train(self, num_steps: int) -> list[float]:
        return [self.step(next(self.stream))["loss"] for _ in range(num_steps)]

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {"model": self.model, "step": self.step, "stream": self.stream}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "rng": torch.get_rng_state()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.step.load_state_dict(state["step"])
        self.stream.load_state_dict(state["stream"])
        torch.set_rng_state(state["rng"])


@pytest.mark.parametrize("spec", [AdamW(), MuonAdamW()])
def test_identity_37_a_resumed_run_is_the_uninterrupted_one_bitwise(data_set, spec):
    torch.manual_seed(7)
    straight = Run(data_set, spec)
    losses = straight.train(STEPS // 2)
    saved = straight.save()
    losses += straight.train(STEPS // 2)

    torch.manual_seed(8)
    resumed = Run(data_set, spec)
    resumed.train(3)  # whatever it did before is forgotten
    resumed.load(saved)
    assert resumed.train(STEPS // 2) == losses[STEPS // 2 :]
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
