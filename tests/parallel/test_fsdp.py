"""A worker on two ranks of FSDP2 against one process with the whole batch."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from training import CASES, MODELS, assert_trained_alike, batch_of, rows_of, sharded, train_cases, weights

from isthmus.core import UserError
from isthmus.core.fragment import local_view, split_strided, split_whole
from isthmus.inner import AdamW, SupervisedStep
from isthmus.inner.optimizers import hidden_matrices
from isthmus.parallel import ParallelDims, apply_fsdp, open_mesh
from isthmus.train.evaluate import evaluate

pytestmark = pytest.mark.processes

MESH = ParallelDims(shard=2)
KEEPS = ParallelDims(shard=2, reshard_after_forward=False)
MIXED = ParallelDims(shard=2, mixed_precision=True)


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_cases, 2, MESH)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_trains_as_unsharded(trained, case: tuple[str, str]):
    assert_trained_alike([rank[CASES.index(case)] for rank in trained], *case)


def look_inside() -> tuple[list[str], int, int, int]:
    model = sharded(MODELS["gpt_neo"], MESH, open_mesh(MESH, 1))
    held = sum(local_view(param).numel() for param in model.parameters())
    synced = sum(view.numel() for fragment in split_strided(model, 2) for view in fragment.params)
    return [name for name, _ in model.named_parameters()], held, synced, len(hidden_matrices(model))


def test_ranks_hold_and_sync_their_shards_only():
    model = MODELS["gpt_neo"].build()
    shares = []
    for names, held, synced, num_matrices in run_ranks(look_inside, 2):
        assert names == [name for name, _ in model.named_parameters()]
        assert synced == held
        assert num_matrices == len(hidden_matrices(model))
        shares.append(held / sum(param.numel() for param in model.parameters()))
    assert sum(shares) == 1
    assert max(shares) < 0.52  # vocabulary and positions do not halve evenly


def skip() -> list[dict[str, float]]:
    """At the second step rank 1 has a loss that is not finite."""
    device_mesh = open_mesh(MESH, 1)
    model = sharded(MODELS["gpt_neox"], MESH, device_mesh)
    poison = model.register_forward_hook(lambda model, inputs, loss: loss * factor)
    step, metrics = SupervisedStep(model, AdamW().build(model), device_mesh=device_mesh), []
    for i in range(3):
        factor = math.nan if (i, dist.get_rank()) == (1, 1) else 1.0
        before = weights(model)
        metrics.append(step(batch_of(i, rows_of(MESH))))
        assert metrics[-1]["skipped"] == all(torch.equal(before[key], value) for key, value in weights(model).items())
    poison.remove()
    return metrics


def test_all_ranks_skip_a_step_that_is_not_finite_on_one():
    first, second = run_ranks(skip, 2)
    assert [metrics["skipped"] for metrics in first] == [0, 1, 0] == [metrics["skipped"] for metrics in second]
    assert [metrics["loss"] for metrics in first if not metrics["skipped"]] == [
        metrics["loss"] for metrics in second if not metrics["skipped"]
    ]


def evaluate_twice(mesh: ParallelDims) -> list[float]:
    """Losses of this rank's rows: as built, and with all weights halved behind FSDP2's back."""
    model = sharded(MODELS["gpt_neo"], mesh, open_mesh(mesh, 1))
    (fragment,) = split_whole(model)
    losses = []
    for _ in range(2):
        losses.append(evaluate(model, [batch_of(0, rows_of(mesh))])["loss"])
        with torch.no_grad():
            torch._foreach_mul_(fragment.params, 0.5)
    return losses


@pytest.mark.parametrize("mesh", [MESH, KEEPS], ids=["reshards", "keeps"])
def test_evaluation_sees_what_an_outer_step_wrote_into_the_shards(mesh: ParallelDims):
    for rank, losses in enumerate(run_ranks(evaluate_twice, 2, mesh)):
        model = MODELS["gpt_neo"].build()
        for loss in losses:
            with torch.no_grad():
                assert loss == pytest.approx(model(batch_of(0, slice(2 * rank, 2 * rank + 2))).item(), rel=1e-6)
                torch._foreach_mul_(list(model.parameters()), 0.5)
        assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def train_mixed() -> tuple[set[torch.dtype], set[torch.dtype], dict[str, float]]:
    """The types that blocks compute in and that parameters have, and the metrics of a step."""
    device_mesh = open_mesh(MIXED, 1)
    model = sharded(MODELS["gpt_neox"], MIXED, device_mesh)
    computed = set()
    for block in model.network.gpt_neox.layers:
        block.mlp.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))
    metrics = SupervisedStep(model, AdamW().build(model), device_mesh=device_mesh)(batch_of(0, rows_of(MIXED)))
    return computed, {param.dtype for param in model.parameters()}, metrics


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32():
    model = MODELS["gpt_neox"].build()
    expected = SupervisedStep(model, AdamW().build(model))(batch_of(0))
    for computed, kept, metrics in run_ranks(train_mixed, 2):
        assert computed == {torch.bfloat16}
        assert kept == {torch.float32}
        assert metrics == pytest.approx(expected, rel=2e-2)  # bfloat16 has 8 bits
        assert metrics["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-6)


def offload() -> str:
    mesh = ParallelDims(shard=2, cpu_offload=True)
    device_mesh = open_mesh(mesh, 1)
    with pytest.raises(UserError) as error:
        apply_fsdp(MODELS["gpt_neox"].build(), mesh, device_mesh)
    return str(error.value)


def test_offload_without_a_gpu_is_refused():
    for message in run_ranks(offload, 2):
        assert message == "mesh: cpu_offload frees a GPU's memory, but there is no GPU here: set it to false"


class Scaled(nn.Linear):
    """A layer with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(()))


def scalar() -> str:
    device_mesh = open_mesh(MESH, 1)
    with pytest.raises(UserError) as error:
        apply_fsdp(nn.Sequential(Scaled()), MESH, device_mesh)
    return str(error.value)


def test_a_scalar_parameter_is_refused():
    for message in run_ranks(scalar, 2):
        assert message == "mesh: shard cannot cut '0.scale', a single number: make it a tensor of shape [1]"
