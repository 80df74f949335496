"""The training step through a pipeline of real ranks against the ordinary one of the whole model."""

import copy
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.parallel.ranks import run_ranks
from tests.parallel.staged import SPECS, staged
from torch import nn
from torch.distributed.tensor import DTensor

from isthmus.core import UserError
from isthmus.inner import AdamW, Cosine, Metrics, MuonAdamW, SupervisedStep
from isthmus.inner.pipelined import PipelinedStep
from isthmus.parallel import ParallelDims

pytestmark = pytest.mark.processes

STEPS = 4
POISONED = 2  # at this step nan flows back into the first layer


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    spec: str
    optimizer: Any
    options: dict[str, Any]


CLIPPED = {"micro_batch_size": 1, "clip_norm": 0.1}
FREE = {"micro_batch_size": 2, "clip_norm": None}
# a smaller eps would make steps of the rounding errors that are the gradient of a key's bias
EVERYWHERE = {name: Case(name, AdamW(eps=1e-5), CLIPPED) for name in SPECS}
EXACT = {
    "adamw": Case("gpt_neox", AdamW(), FREE),
    "muon": Case("gpt_neox", MuonAdamW(), FREE),
    "bfloat16": Case("gpt_neox", AdamW(), {**FREE, "precision": "bfloat16"}),
    "float16": Case("gpt_neox", AdamW(), {**FREE, "precision": "float16"}),
}
LAYOUTS = {
    "pp2": (ParallelDims(pp=2), 1, EVERYWHERE | EXACT),
    "pp3": (ParallelDims(pp=3), 1, EVERYWHERE),
    "interleaved": (ParallelDims(pp=2), 2, EVERYWHERE | EXACT),
    "pp2-shard2": (ParallelDims(pp=2, shard=2), 1, EVERYWHERE),
    "interleaved-shard2": (ParallelDims(pp=2, shard=2), 2, EVERYWHERE),
    "pp2-tp2": (ParallelDims(pp=2, tp=2), 1, EVERYWHERE),
}


@dataclass(frozen=True)
class Trained:
    """What training left behind on one rank."""

    weights: dict[str, torch.Tensor]
    metrics: list[Metrics]
    scaler: dict[str, Any]


def train(case: Case, mesh: ParallelDims, stages_per_rank: int) -> Trained:
    """Train this rank's stages."""
    model, stages, device_mesh = staged(SPECS[case.spec], mesh, stages_per_rank)
    shard, num_shards = device_mesh.get_local_rank("shard"), mesh.shard
    optimizer = case.optimizer.build(model)
    step = PipelinedStep(model, stages, device_mesh, optimizer, Cosine().over(8), **case.options)
    return _train(model, step, lambda batch: {"tokens": batch["tokens"].chunk(num_shards)[shard]})


@cache
def train_whole(case_name: str) -> Trained:
    """The same in one process."""
    case = (EVERYWHERE | EXACT)[case_name]
    model = SPECS[case.spec].build()
    step = SupervisedStep(model, case.optimizer.build(model), Cosine().over(8), **case.options)
    return _train(model, step, lambda batch: batch)


def _train(model: nn.Module, step: SupervisedStep, rows) -> Trained:
    def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad and step.progress == POISONED:
            output.register_hook(lambda grad: grad * math.nan)

    for name, module in model.named_modules():
        if name.endswith(("layers.0.mlp", "h.0.mlp")):  # one stage has it
            module.register_forward_hook(spoil)
    metrics = [step(rows(batch_of(i))) for i in range(STEPS)]
    weights = {key: whole(param) for key, param in model.named_parameters()}
    return Trained(weights, metrics, step.state_dict()["scaler"])


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(step))}


def whole(param: torch.Tensor) -> torch.Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def work(layout: str):
    mesh, stages_per_rank, cases = LAYOUTS[layout]
    return {name: vars(train(case, mesh, stages_per_rank)) for name, case in cases.items()}


@cache
def results_of(layout: str) -> list[dict[str, Trained]]:
    """By rank and case."""
    results = run_ranks(work, LAYOUTS[layout][0].num_ranks, layout)
    return [{name: Trained(**trained) for name, trained in result.items()} for result in results]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_stages_train_as_the_whole_model(name, layout):
    """The gradient is clipped by its norm over all stages, and one step skipped, by all ranks."""
    expected, results = train_whole(name), [result[name] for result in results_of(layout)]
    assert [metrics["skipped"] for metrics in expected.metrics] == [0, 0, 1, 0]
    assert min(m["grad_norm"] for m in expected.metrics if not m["skipped"]) > 2 * CLIPPED["clip_norm"]
    assert {key for trained in results for key in trained.weights} == set(expected.weights)
    for trained in results:
        for key, weight in trained.weights.items():
            message = partial("{}: {}".format, key)
            torch.testing.assert_close(weight, expected.weights[key], rtol=1e-4, atol=1e-6, msg=message)
        for mine, theirs in zip(trained.metrics, expected.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
        assert str(trained.metrics) == str(results[0].metrics)  # exactly


@pytest.mark.parametrize("layout", ["pp2", "interleaved"])
@pytest.mark.parametrize("name", EXACT)
def test_stages_alone_change_no_bit(name, layout):
    """Same micro-batches, same order; only the norm is added up otherwise, which unclipped changes no weight."""
    expected = train_whole(name)
    for result in results_of(layout):
        trained = result[name]
        for key, weight in trained.weights.items():
            assert torch.equal(weight, expected.weights[key]), key
        for mine, theirs in zip(trained.metrics, expected.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6, nan_ok=True)
        assert trained.scaler == expected.scaler


def test_float16_overflowed_and_found_its_scale():
    """Else the test above has seen no overflow."""
    trained = train_whole("float16")
    assert trained.scaler["scale"] < 2.0**16


def resumed(stages_per_rank: int):
    """Weights after six steps, straight and with all state handed over to new objects after three."""

    def step_of(parts) -> PipelinedStep:
        model, stages, device_mesh = parts
        return PipelinedStep(model, stages, device_mesh, AdamW().build(model), Cosine().over(8))

    spec, mesh = SPECS["gpt_neo"], ParallelDims(pp=2)
    first = staged(spec, mesh, stages_per_rank)
    step = step_of(first)
    for i in range(3):
        step(batch_of(i))
    second = staged(spec, mesh, stages_per_rank)
    second[0].load_state_dict(first[0].state_dict())
    later = step_of(second)
    later.load_state_dict(copy.deepcopy(step.state_dict()))
    for i in range(3, 6):
        assert step(batch_of(i)) == later(batch_of(i))
    return [[param.detach() for param in model.parameters()] for model, *_ in (first, second)]


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_saved_state_continues_bit_for_bit(stages_per_rank):
    """The tied head is in nobody's state: it is lent again."""
    for straight, continued in run_ranks(resumed, 2, stages_per_rank):
        assert all(torch.equal(a, b) for a, b in zip(straight, continued, strict=True))


def refusals():
    """What a step says to a batch that it cannot split, and to being timed alone."""
    model, stages, device_mesh = staged(SPECS["gpt_neox"], ParallelDims(pp=2))
    step = PipelinedStep(model, stages, device_mesh, AdamW().build(model), micro_batch_size=8)
    messages = []
    for call in (step, step.forward_backward):
        with pytest.raises(UserError) as refused:
            call(batch_of(0))
        messages.append(str(refused.value))
    return messages


def test_what_a_pipeline_cannot_do_is_refused_on_every_rank():
    for batch, auto in run_ranks(refusals, 2):
        assert "at least 2 micro-batches, 8 samples give 1" in batch
        assert "micro_batch_size is auto" in auto
