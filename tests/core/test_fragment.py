"""Cutting a model into fragments."""

import pytest
import torch
from torch import nn

from isthmus.core import UserError, split_balanced, split_strided, split_whole


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))
        self.heads = nn.ModuleList([nn.Linear(4, 2)])
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def covered(fragments, model) -> list[int]:
    pointers = [param.data_ptr() for fragment in fragments for param in fragment.params]
    assert len(set(pointers)) == len(pointers)
    return sorted(pointers) == sorted(p.data_ptr() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("split", [split_strided, split_balanced])
@pytest.mark.parametrize("num_fragments", [1, 2, 3, 5])
def test_every_trainable_parameter_lies_in_exactly_one_fragment(split, num_fragments) -> None:
    model = Blocks()
    fragments = split(model, num_fragments)
    assert [fragment.name for fragment in fragments] == [str(index) for index in range(num_fragments)]
    assert covered(fragments, model)


def test_strided_takes_every_pth_block() -> None:
    model = Blocks()
    fragments = split_strided(model, 2)
    owner = {p.data_ptr(): index for index, fragment in enumerate(fragments) for p in fragment.params}
    assert [owner[block.weight.data_ptr()] for block in model.blocks] == [0, 1, 0, 1, 0]


def test_balanced_sizes_differ_by_at_most_the_largest_tensor() -> None:
    model = nn.ModuleList(nn.Linear(size, 7) for size in (3, 50, 11, 29, 8, 17))
    sizes = [sum(p.numel() for p in fragment.params) for fragment in split_balanced(model, 3)]
    assert max(sizes) - min(sizes) <= 350


def test_params_are_views_and_anchors_are_float32_copies() -> None:
    model = Blocks().bfloat16()
    (fragment,) = split_whole(model)
    fragment.params[0].zero_()
    assert model.embedding.weight.abs().sum() == 0
    assert fragment.anchor[0].dtype == torch.float32
    assert fragment.anchor[0].abs().sum() > 0


def test_tied_parameters_are_synced_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    assert len(split_whole(model)[0].params) == 3


@pytest.mark.parametrize("model", [Blocks(5), nn.Sequential(nn.Linear(3, 50), nn.Linear(50, 40), nn.Linear(40, 9))])
def test_a_model_without_enough_blocks_is_split_into_balanced_parts(model, caplog) -> None:
    with caplog.at_level("INFO"):
        fragments = split_strided(model, 6)
    assert covered(fragments, model)
    assert [f.param_names for f in fragments] == [f.param_names for f in split_balanced(model, 6)]
    (record,) = caplog.records
    assert record.getMessage().startswith("the model has no list of at least 6 blocks (nn.ModuleList): it is split")


def test_more_fragments_than_tensors_are_refused() -> None:
    for split in (split_balanced, split_strided):
        with pytest.raises(UserError, match=r"2 trainable tensors.* set outer\.schedule\.num_fragments to 2 or less"):
            split(nn.Linear(2, 2), 9)
    with pytest.raises(UserError, match="makes 1 fragment, not 2: set it to strided or balanced"):
        split_whole(Blocks(), 2)
