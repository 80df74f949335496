"""One worker on many ranks against the same worker on one: what the tests of parallel/ share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from isthmus.inner import AdamW, Metrics, MuonAdamW, SupervisedStep
from isthmus.models import ModelSpec
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.parallel import Mesh, apply_fsdp, apply_tp, open_mesh, tensor_plan

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 30, "sequence_length": 8}
MODELS = {"gpt_neox": GPTNeoX(**SIZES), "gpt_neo": GPTNeo(**SIZES, window_size=4)}
OPTIMIZERS = {"adamw": AdamW(), "muon": MuonAdamW()}


def batch_of(step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Some rows of the worker's batch [4, 9] of a step."""
    tokens = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[rows]}


def rows_of(mesh: Mesh) -> slice:
    """This rank's rows of the worker's batch."""
    rows = 4 // mesh.shard
    shard = mesh.coordinates(dist.get_rank()).shard
    return slice(shard * rows, (shard + 1) * rows)


def sharded(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, DeviceMesh]:
    """The model on this rank of the only worker."""
    device_mesh = open_mesh(mesh, 1)
    model = spec.build().to(dtype)
    apply_tp(model, tensor_plan(spec, mesh.tp), device_mesh)
    apply_fsdp(model, mesh, device_mesh)
    return model, device_mesh


def train(
    model: nn.Module, optimizer: str, rows: slice, device_mesh: DeviceMesh | None, num_steps: int = 4, **options
) -> list[Metrics]:
    """Some steps of two micro-batches, with clipping active."""
    options = {"micro_batch_size": (rows.stop or 4) - (rows.start or 0) - 1, "clip_norm": 0.5, **options}
    step = SupervisedStep(model, OPTIMIZERS[optimizer].build(model), mesh=device_mesh, **options)
    return [step(batch_of(i, rows)) for i in range(num_steps)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return {name: whole(param) for name, param in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
