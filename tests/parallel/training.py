"""One worker on many ranks against the same worker on one: what the tests of FSDP2 and tensor parallelism share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from isthmus.inner import AdamW, Metrics, MuonAdamW, SupervisedStep
from isthmus.models import ModelSpec
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.parallel import ParallelDims, apply_fsdp, apply_tp, open_mesh, tensor_plan

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 31, "sequence_length": 8}  # odd: no tp fits
MODELS = {"gpt_neox": GPTNeoX(**SIZES), "gpt_neo": GPTNeo(**SIZES, window_size=4)}
# Muon in float64: what it makes of rounding errors of float32 (small singular values) is as large as an update
OPTIMIZERS = {"adamw": (AdamW(), torch.float32), "muon": (MuonAdamW(), torch.float64)}
CASES = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
Trained = tuple[dict[str, torch.Tensor], list[Metrics]]


def batch_of(step: int, rows: slice = slice(0, 4)) -> dict[str, torch.Tensor]:
    """Some rows of the worker's batch [4, 9] of a step."""
    tokens = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[rows]}


def rows_of(mesh: ParallelDims) -> slice:
    """This rank's rows of the worker's batch."""
    rows, shard = 4 // mesh.shard, mesh.coordinates(dist.get_rank()).shard
    return slice(shard * rows, (shard + 1) * rows)


def sharded(
    spec: ModelSpec, mesh: ParallelDims, device_mesh: DeviceMesh, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model on this rank of the only worker."""
    model = spec.build().to(dtype)
    apply_tp(model, tensor_plan(spec, mesh.tp), device_mesh)
    apply_fsdp(model, mesh, device_mesh)
    return model


def train(model: nn.Module, optimizer: str, rows: slice, mesh: DeviceMesh | None = None) -> list[Metrics]:
    """Four steps of two micro-batches each, all of them clipped."""
    micro_batch_size = (rows.stop - rows.start) // 2
    built = OPTIMIZERS[optimizer][0].build(model)
    step = SupervisedStep(model, built, micro_batch_size=micro_batch_size, clip_norm=0.5, device_mesh=mesh)
    return [step(batch_of(i, rows)) for i in range(4)]


def train_cases(mesh: ParallelDims) -> list[Trained]:
    """On one rank of a worker: whole weights and metrics of every case."""
    device_mesh, trained = open_mesh(mesh, 1), []
    for name, optimizer in CASES:
        model = sharded(MODELS[name], mesh, device_mesh, OPTIMIZERS[optimizer][1])
        metrics = train(model, optimizer, rows_of(mesh), device_mesh)
        trained.append((weights(model), metrics))
    return trained


def assert_trained_alike(all_ranks: list[Trained], name: str, optimizer: str) -> None:
    """Every rank ended where one process with the whole batch ends."""
    model = MODELS[name].build().to(OPTIMIZERS[optimizer][1])
    expected = train(model, optimizer, slice(0, 4))
    assert min(metrics["grad_norm"] for metrics in expected) > 0.5
    close = {"rtol": 1e-4, "atol": 1e-5} if optimizer == "adamw" else {"rtol": 1e-9, "atol": 1e-11}
    first, _ = all_ranks[0]
    for found, metrics in all_ranks:
        torch.testing.assert_close(found, weights(model), **close)
        for key in found:
            assert torch.equal(found[key], first[key]), key  # no rank of a worker drifts from the others
        for mine, whole in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(whole, rel=1e-5)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return {name: whole(param) for name, param in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
