"""Which parameters go where, and the combined optimizer as a torch.optim.Optimizer."""

import io

import pytest
import torch
from torch import nn

from isthmus.core import UserError
from isthmus.inner import AdamW, MuonAdamW
from isthmus.inner.optimizers import hidden_matrices


class Model(nn.Module):
    """Embedding, two blocks (one with a table of its own), norm, head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 6)
        with_table = nn.ModuleDict({"w": nn.Linear(6, 6), "table": nn.Embedding(4, 6)})
        self.blocks = nn.ModuleList([nn.Linear(6, 6), with_table])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        x = self.blocks[1]["w"](x) + self.blocks[1]["table"](tokens % 4)
        return nn.functional.cross_entropy(self.head(self.norm(x)), tokens)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(torch.randint(10, (16,), generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()


def names(model: nn.Module, params: list[nn.Parameter]) -> set[str]:
    return {name for name, param in model.named_parameters() if any(param is other for other in params)}


def test_hidden_matrices_are_those_of_the_blocks():
    model = Model()
    assert names(model, hidden_matrices(model)) == {"blocks.0.weight", "blocks.1.w.weight"}


def test_filters_of_the_blocks_are_hidden_matrices_and_what_has_one_row_or_column_is_not():
    blocks = nn.ModuleList(
        [nn.Conv2d(3, 8, 3), nn.Conv1d(1, 8, 1), nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3), dim=2)]
    )
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 3, 3), "blocks": blocks})
    magnitudes, directions = (f"blocks.2.parametrizations.weight.original{i}" for i in range(2))
    assert dict(model.named_parameters())[magnitudes].shape == (1, 1, 3)
    assert names(model, hidden_matrices(model)) == {"blocks.0.weight", directions}


def test_adamw_decays_matrices_only():
    model = Model()
    decayed, others = AdamW(weight_decay=0.3).build(model).param_groups
    assert names(model, decayed["params"]) == {"blocks.0.weight", "blocks.1.w.weight", "head.weight"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_adamw_trains_as_torchs_plain_version():
    ours, theirs = Model(), Model()
    decayed = {"blocks.0.weight", "blocks.1.w.weight", "head.weight"}
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * (name in decayed)} for name, p in theirs.named_parameters()],
        lr=3e-3,
        betas=(0.9, 0.95),
        foreach=False,
    )
    train(ours, AdamW().build(ours), range(20))
    train(theirs, reference, range(20))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    model = Model()
    optimizer = MuonAdamW(lr=0.01, adamw_lr=0.002).build(model)
    matrices, head, _ = optimizer.param_groups
    assert names(model, matrices["params"]) == {"blocks.0.weight", "blocks.1.w.weight"}
    assert names(model, head["params"]) == {"head.weight"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002, 0.002]
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    assert count == len({id(p) for group in optimizer.param_groups for p in group["params"]}) == 10


def test_combined_equals_its_parts_stepped_apart():
    together, apart = Model(), Model()
    train(together, MuonAdamW().build(together), range(10))
    parts = MuonAdamW().build(apart).parts
    for step in range(10):
        train(apart, parts[0], range(step, step + 1))
        # the second part sees the gradient of the same weights
        parts[1].step()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", [AdamW(), MuonAdamW()])
def test_state_dict_survives_saving(spec):
    model = Model()
    optimizer = spec.build(model)
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(5, 10))

    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed = Model()
    resumed_optimizer = spec.build(resumed)
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, range(5, 10))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_groups_of_the_combined_optimizer_stay_live_after_loading():
    model = Model()
    optimizer = MuonAdamW().build(model)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, range(3))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_muon_needs_blocks():
    with pytest.raises(UserError, match="use adamw"):
        MuonAdamW().build(nn.Linear(3, 3))


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}])
def test_bad_values_are_refused(bad):
    for spec in (AdamW, MuonAdamW):
        with pytest.raises(UserError, match=r"inner\.optimizer"):
            spec(**bad)
