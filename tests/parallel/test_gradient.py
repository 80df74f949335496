"""Norm, clipping and loss scale over all ranks of a worker, whatever each of them holds."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from isthmus.core.fragment import local_view
from isthmus.parallel import ParallelDims, WorkerGradScaler, clip_gradient, gradient_norm, open_mesh

pytestmark = pytest.mark.processes

MESH = ParallelDims(pp=2, shard=2, tp=2)
SPLIT = {"shard": (Shard(0),), "tp": (Shard(0),), "both": (Shard(0), Shard(0)), "one of both": (Shard(1), Replicate())}


def gradients(stage: int) -> dict[str, torch.Tensor]:
    """Of one stage, whole; sizes that no 2 divides."""
    random = torch.Generator().manual_seed(stage)
    return {key: torch.randn(5, 3, generator=random) for key in ("plain", *SPLIT)}


def parameters(device_mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """This rank's parameters with gradients, each sharded in another way; one has none."""
    dims = {"shard": device_mesh["shard"], "tp": device_mesh["tp"]}
    params = {"unused": nn.Parameter(torch.ones(3))}
    for key, grad in gradients(device_mesh.get_local_rank("pp")).items():
        if key in SPLIT:
            grad = distribute_tensor(grad, dims.get(key, device_mesh["shard", "tp"]), SPLIT[key])
        params[key] = nn.Parameter(torch.zeros_like(grad))
        params[key].grad = grad
    return params


def clip() -> tuple[float, float, float]:
    """The norm; after clipping; with one value of one rank gone bad."""
    device_mesh = open_mesh(MESH, 1)
    params = parameters(device_mesh)
    norm = gradient_norm(params.values(), device_mesh).item()
    clip_gradient(params.values(), 0.25, norm)
    clipped = gradient_norm(params.values(), device_mesh).item()
    if dist.get_rank() == 3:
        local_view(params["both"].grad)[0, 0] = math.inf
    return norm, clipped, gradient_norm(params.values(), device_mesh).item()


def test_norm_and_clipping_are_those_of_the_whole_model():
    grads = [grad for stage in (0, 1) for grad in gradients(stage).values()]
    norm = nn.utils.get_total_norm(grads).item()
    ranks = run_ranks(clip, 8)
    assert ranks == [ranks[0]] * 8  # to the bit
    assert ranks[0] == (pytest.approx(norm, rel=1e-6), pytest.approx(0.25, rel=1e-6), math.inf)


def overflow() -> list[float]:
    """The loss scale after every step; at the second, rank 1's part alone overflows. It is halved, then doubled."""
    device_mesh = open_mesh(ParallelDims(shard=2), 1)
    shards = {"device_mesh": device_mesh["shard"], "placements": SPLIT["shard"]}
    plain, split = nn.Parameter(torch.ones(2)), nn.Parameter(distribute_tensor(torch.ones(4), **shards))
    optimizer = torch.optim.SGD([{"params": [plain]}, {"params": [split]}], lr=1.0)
    scaler, scales = WorkerGradScaler(device_mesh, init_scale=4.0, growth_interval=2), []
    for i in range(4):
        plain.grad, split.grad = torch.ones(2), distribute_tensor(torch.full((4,), 8.0), **shards)
        if (i, dist.get_rank()) == (1, 1):
            local_view(split.grad)[0] = math.inf
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        assert isinstance(split.grad, DTensor)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, *plain.tolist(), *local_view(split).tolist()]


def test_an_overflow_on_one_rank_changes_the_loss_scale_and_skips_on_all():
    ranks = run_ranks(overflow, 2)
    plain = 1 - 1 / 4 - 2 * 1 / 2
    split = 1 - 8 / 4 - 2 * 8 / 2
    assert ranks == [[4.0, 2.0, 2.0, 4.0, plain, plain, split, split]] * 2
