"""The gradient of a worker's whole model, of which every rank holds a part."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from isthmus.core.fragment import is_dtensor, local_view
from isthmus.parallel.mesh import WORKER_DIMS, sum_over


def gradient_norm(params: Iterable[nn.Parameter], device_mesh: DeviceMesh) -> torch.Tensor:
    """Return the Euclidean norm of the gradient over all ranks of a worker, the same on all of them.

    `torch.nn.utils.get_total_norm` takes neither parameters of different meshes nor those of other pipeline stages.

    Args:
        params: of this rank, sharded or not; weights that two stages have (tied ones) are given by one of them only.
        device_mesh: with the dimensions pp, shard and tp.

    Returns:
        float64 scalar on the mesh's device, so that the order in which ranks add up does not show; nan or inf where
        any rank's gradient is.
    """
    grads = [param.grad for param in params if param.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device_mesh.device_type)
    if grads:
        norms = torch.stack(torch._foreach_norm([local_view(grad) for grad in grads])).double()
        replicas = torch.tensor([_num_replicas(grad, device_mesh) for grad in grads], device=norms.device)
        total += (norms.square() / replicas).sum()
    return sum_over(total, device_mesh, WORKER_DIMS).sqrt()


def clip_gradient(params: Iterable[nn.Parameter], clip_norm: float, norm: float) -> None:
    """Scale the gradient, whose norm is `norm`, down to `clip_norm` (as `torch.nn.utils.clip_grads_with_norm_`)."""
    grads = [local_view(param.grad) for param in params if param.grad is not None]
    torch._foreach_mul_(grads, min(1.0, clip_norm / (norm + 1e-6)))


class WorkerGradScaler(torch.amp.GradScaler):
    """A loss scale that all ranks of a worker change alike: an overflow on one of them counts on all."""

    def __init__(self, device_mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(device_mesh.device_type, **options)
        self._device_mesh = device_mesh

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [local_view(param.grad) for param in params if param.grad is not None]
        if grads:
            found = found_inf.to(grads[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(found.device))
            found_inf = found.to(found_inf.device)
        return {found_inf.device: sum_over(found_inf, self._device_mesh, WORKER_DIMS)}


def _num_replicas(grad: torch.Tensor, device_mesh: DeviceMesh) -> int:
    """Return how many ranks of this pipeline stage hold the same values of a gradient."""
    num_ranks = device_mesh.get_group("shard").size() * device_mesh.get_group("tp").size()
    if is_dtensor(grad):
        for dim, placement in enumerate(grad.placements):
            num_ranks //= 1 if placement.is_replicate() else grad.device_mesh.size(dim)
    return num_ranks
