"""Stages against the model they were cut from, and their schedules over real ranks."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from tests.parallel.ranks import run_ranks
from tests.parallel.staged import SPECS, staged
from torch import nn

from isthmus.core import UserError, split_strided
from isthmus.inner.optimizers import hidden_matrices
from isthmus.models import Module
from isthmus.models.stages import split_into_stages
from isthmus.parallel import ParallelDims
from isthmus.parallel.pipeline import Pipeline, count_micro_batches

TOKENS = torch.randint(30, (6, 9), generator=torch.Generator().manual_seed(9))


def all_ranks(spec, num_ranks: int, stages_per_rank: int = 1):
    """(model, stages) of every rank, in one process."""
    for rank in range(num_ranks):
        model = spec.build()
        yield model, split_into_stages(spec, model, rank, num_ranks, stages_per_rank)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (3, 1), (5, 1)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_stages_one_after_another_are_the_model(name, layout):
    """Bit for bit, dropout included: it is drawn in the same places."""
    spec = replace(SPECS[name], dropout=0.3)
    stages = {number: stage for _, part in all_ranks(spec, *layout) for number, stage in part.modules.items()}
    torch.manual_seed(1)
    expected = spec.build()({"tokens": TOKENS})
    torch.manual_seed(1)
    hidden = TOKENS
    for number in range(len(stages)):
        hidden = stages[number](hidden)
    torch.manual_seed(1)
    assert len(stages) == layout[0] * layout[1]
    assert torch.equal(next(all_ranks(spec, *layout))[1].loss(hidden, TOKENS), expected)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_ranks_share_out_the_parameters_under_their_names(name, layout):
    whole = dict(SPECS[name].build().named_parameters())
    parts = [dict(model.named_parameters()) for model, _ in all_ranks(SPECS[name], *layout)]
    assert sorted(key for part in parts for key in part) == sorted(whole)
    assert all(torch.equal(param, whole[key]) for part in parts for key, param in part.items())


@pytest.mark.parametrize("name", SPECS)
def test_layers_are_shared_out_evenly_and_interleaved_stages_take_turns(name):
    def layers(num_ranks, stages_per_rank):
        parts = [model.named_parameters() for model, _ in all_ranks(SPECS[name], num_ranks, stages_per_rank)]
        return [sorted({int(k.split(".")[3]) for k, _ in part if ".layers." in k or ".h." in k}) for part in parts]

    assert layers(2, 1) == [[0, 1, 2], [3, 4]]
    assert layers(3, 1) == [[0, 1], [2, 3], [4]]
    assert layers(2, 2) == [[0, 1, 3], [2, 4]]


def numbers_of(keys: Iterable[str]) -> set[int]:
    """The blocks that these parameters belong to."""
    return {int(key.split(".")[3]) for key in keys if ".layers." in key or ".h." in key}


@pytest.mark.parametrize("name", SPECS)
def test_fragments_and_matrices_are_found_in_a_rank_s_part(name):
    """Blocks go to the fragments in turn, on every rank; Muon's matrices are the whole model's."""
    matrices = 0
    for model, _ in all_ranks(SPECS[name], 2):
        fragments = split_strided(model, 2)
        assert sum(len(f.params) for f in fragments) == len(list(model.parameters()))
        by_name = {param.data_ptr(): key for key, param in model.named_parameters()}
        blocks = sorted(numbers_of(by_name.values()))
        for index, fragment in enumerate(fragments):
            keys = [by_name[param.data_ptr()] for param in fragment.params]
            assert numbers_of(keys) == set(blocks[index::2])
        matrices += len(hidden_matrices(model))
    assert matrices == len(hidden_matrices(SPECS[name].build()))


@pytest.mark.parametrize(("name", "lends"), [("gpt_neox", False), ("gpt_neo", True)])
def test_stages_are_made_of_the_model_s_own_parameters(name, lends):
    """Only a tied head is another rank's."""
    (first, first_stages), (last, last_stages) = all_ranks(SPECS[name], 2)
    params = [{id(p) for p in module.parameters()} for module in (first, first_stages.modules[0])]
    assert params[0] == params[1]
    owned, computed_with = ({id(p) for p in module.parameters()} for module in (last, last_stages.modules[1]))
    assert owned <= computed_with
    assert computed_with - owned == ({id(last_stages.tied.weight)} if lends else set())
    assert (first_stages.tied is None) is not lends


def test_more_stages_than_layers():
    with pytest.raises(UserError, match="6 pipeline stages are too many for a model of 5 layers"):
        next(all_ranks(SPECS["gpt_neox"], 3, 2))


def test_a_model_that_cannot_be_cut():
    spec = Module("torch.nn:Linear", {"in_features": 2, "out_features": 2})
    with pytest.raises(UserError, match=r"Module cannot be cut into stages; set it to 1"):
        next(all_ranks(spec, 2))


@pytest.mark.parametrize(
    ("sizes", "number"),
    [((8, 2, 2), 4), ((8, None, 2), 2), ((8, 4, 2), 2), ((6, 9, 1), 1), ((12, 4, 2, 2), 3), ((10, 1, 4, 2), 10)],
    ids=str,
)
def test_micro_batches(sizes, number):
    assert count_micro_batches(*sizes) == number


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 3, 2), "3 does not divide the 8 samples"),
        ((7, None, 2), "3 does not divide the 7 samples"),
        ((8, 8, 2), "at least 2 micro-batches, 8 samples give 1"),
        ((1, None, 2), "at least 2 micro-batches, 1 samples give 1"),
        ((5, 1, 2, 2), "5 do not split into 2 rounds"),
    ],
    ids=str,
)
def test_micro_batches_that_do_not_fit_the_schedule(sizes, message):
    with pytest.raises(UserError, match=message):
        count_micro_batches(*sizes)


def evaluations(model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Losses of 6 and of 5 samples, which two ranks do not split, with weights that change between them."""
    losses = []
    with torch.no_grad():
        for factor in (1.0, 30.0, 1 / 30):
            for param in model.parameters():
                param.mul_(factor)
            losses += [loss_of(TOKENS), loss_of(TOKENS[:5])]
    return torch.stack(losses)


def evaluate_stages(mesh: ParallelDims, stages_per_rank: int) -> dict[str, torch.Tensor]:
    """The evaluations of each model after a step, which leaves the schedule of training behind."""
    losses = {}
    for name, spec in SPECS.items():
        model, stages, device_mesh = staged(replace(spec, dropout=0.3), mesh, stages_per_rank)
        pipeline = Pipeline(stages, device_mesh, torch.autocast("cpu", torch.bfloat16))
        pipeline.accumulate({"tokens": TOKENS})
        losses[name] = evaluations(model, lambda tokens, run=pipeline.evaluate: run({"tokens": tokens}))
        pipeline.accumulate({"tokens": TOKENS})
        assert all(stage.training for stage in stages.modules.values())
    return losses


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shard", "stages_per_rank", "reshard"), [(1, 1, True), (1, 2, True), (2, 1, True), (2, 1, False), (2, 2, True)]
)
def test_evaluation_sees_the_present_weights_exactly_and_without_dropout(shard, stages_per_rank, reshard):
    """Between two steps in bfloat16, as anchors are evaluated: in float32."""
    mesh = ParallelDims(pp=2, shard=shard, reshard_after_forward=reshard)
    results = run_ranks(evaluate_stages, mesh.num_ranks, mesh, stages_per_rank)
    for name, spec in SPECS.items():
        model = spec.build().eval()
        expected = evaluations(model, lambda tokens, model=model: model({"tokens": tokens}))
        assert expected.std() > 0.1
        for losses in results:
            torch.testing.assert_close(losses[name], expected)


def infinite_loss() -> list[bool]:
    """Whether gradients are finite, of a loss that is infinite though its gradient is not."""
    model, stages, device_mesh = staged(SPECS["gpt_neox"], ParallelDims(pp=2))
    endless = replace(stages, loss=lambda output, tokens: output.sum() + math.inf)
    Pipeline(endless, device_mesh).accumulate({"tokens": TOKENS})
    return [bool(param.grad.isfinite().all()) for param in model.parameters()]


@pytest.mark.processes
def test_a_loss_that_is_not_finite_shows_in_every_stage_s_gradient():
    assert not any(any(finite) for finite in run_ranks(infinite_loss, 2))
