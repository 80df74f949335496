"""A mesh of one rank takes the paths of larger ones: over gloo here, over NCCL where there is a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.training import MODELS, batch_of, whole
from tests.workers import results, run
from torch import nn

from isthmus.inner import SupervisedStep
from isthmus.inner.pipelined import PipelinedStep
from isthmus.models.stages import split_into_stages
from isthmus.parallel import ParallelDims, apply_fsdp, apply_tp, gradient_norm, open_mesh, tensor_plan
from isthmus.train.process import backend_of
from isthmus.transport.rendezvous import initialise

pytestmark = [pytest.mark.processes, pytest.mark.gpu]

DEVICES = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
# what a mesh of two has; here the one rank does all of it
DIMS: dict[str, dict[str, Any]] = {
    "fsdp": {"shard": 2},
    "fsdp, kept whole": {"shard": 2, "reshard_after_forward": False},
    "fsdp in bfloat16": {"shard": 2, "mixed_precision": True},
    "tp": {"tp": 2},
    "tp and fsdp": {"tp": 2, "shard": 2},
    "pp": {},
    "fsdp, offloaded": {"shard": 2, "cpu_offload": True},
}
CASES = [(device, kind) for device in DEVICES for kind in DIMS if device == "cuda" or "cpu_offload" not in DIMS[kind]]


def join(device: str) -> Any:
    """Return the device mesh of a worker of one rank, connected as the ranks of a worker are."""
    if device == "cuda":
        torch.cuda.set_device(0)
    initialise(backend_of(torch.device(device)), 60.0, ["worker 0"])
    return open_mesh(ParallelDims(), 1, device)


def collect(rank: int, device: str) -> list[Any]:
    """What every collective that isthmus or torch's parallelism calls gives on each dimension of the mesh."""
    device_mesh, found = join(device), list[Any]()
    for name in ("worker", "pp", "shard", "tp"):
        group = device_mesh.get_group(name)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            values = torch.arange(6, device=device).to(dtype)
            gathered, scattered = torch.empty_like(values), torch.empty_like(values)
            total, sent = values.clone(), values.clone()
            dist.all_reduce(total, group=group)
            dist.broadcast(sent, group=group, group_src=0)
            dist.all_gather_into_tensor(gathered, values, group=group)
            dist.reduce_scatter_tensor(scattered, values, group=group)
            found += [each.tolist() for each in (total, sent, gathered, scattered)]
        on_cpu = torch.ones(3)  # of the same group, over gloo
        dist.all_reduce(on_cpu, group=group)
        found.append(on_cpu.tolist())
    return [backend_of(torch.device(device)), dist.get_backend(), found]


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_of_every_dimension(device):
    ((wanted, backend, found),) = results(run(collect, 1, device=device))
    assert backend == wanted
    assert found == [*[[0, 1, 2, 3, 4, 5]] * 16, [1, 1, 1]] * 4


def train(rank: int, device: str, kind: str) -> list[Any]:
    """The losses and norms of four steps, and the weights behind them: on the mesh, then without one."""
    device_mesh, dims, spec, found = join(device), ParallelDims(**DIMS[kind]), MODELS["gpt_neox"], list[Any]()
    for on_mesh in (True, False):
        model = spec.build().to(device)
        if on_mesh and kind == "pp":
            step: Any = _pipelined(spec, model, device_mesh)
        else:
            if on_mesh:
                apply_tp(model, tensor_plan(spec, dims.tp), device_mesh)
                apply_fsdp(model, dims, device_mesh)
            step = SupervisedStep(
                model,
                _sgd(model),
                clip_norm=0.5,
                micro_batch_size=2,
                precision="bfloat16" if dims.mixed_precision and not on_mesh else "float32",
                device_mesh=device_mesh if on_mesh else None,
            )
        metrics = [step(batch_of(number)) for number in range(4)]
        if on_mesh:
            norm = gradient_norm(model.parameters(), device_mesh).item()
            assert norm == pytest.approx(min(0.5, metrics[-1]["grad_norm"]), rel=1e-3)
        found.append((metrics, {name: whole(param).cpu().tolist() for name, param in model.named_parameters()}))
    gc.collect()
    return found


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Linear in the gradient: Adam makes steps of rounding errors, which differ on a GPU from run to run."""
    # torch's loop over all at once, the default on a GPU, refuses a mixture of DTensors and plain tensors
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)


def _pipelined(spec: Any, model: nn.Module, device_mesh: Any) -> PipelinedStep:
    stages = split_into_stages(spec, model, 0, 1, 1)
    return PipelinedStep(model, stages, device_mesh, _sgd(model), clip_norm=0.5, micro_batch_size=2)


@pytest.mark.parametrize(("device", "kind"), CASES)
def test_training_is_that_of_one_process_without_a_mesh(device, kind):
    (((metrics, weights), (plain_metrics, plain_weights)),) = results(run(train, 1, device=device, kind=kind))
    rough = "bfloat16" in kind
    for mine, theirs in zip(metrics, plain_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-2 if rough else 1e-4)
    assert weights.keys() == plain_weights.keys()
    for name, values in weights.items():
        expected = torch.tensor(plain_weights[name])
        close = {"rtol": 0, "atol": 2e-2} if rough else {"rtol": 1e-3, "atol": 2e-5}
        torch.testing.assert_close(torch.tensor(values), expected, **close)
