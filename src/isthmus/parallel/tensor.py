"""A worker's matrices split over some of its ranks, by tensor parallelism."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.core.types import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_plan(spec: object, tp: int) -> dict[str, ParallelStyle]:
    """Return how a model's modules are split over `tp` ranks, by name, where `*` stands for anything.

    Raises:
        UserError: the model says no such plan (`spec.tensor_plan(tp)`), or does not split into so many parts.
    """
    if tp == 1:
        return {}
    if not hasattr(spec, "tensor_plan"):
        raise UserError(
            f"mesh: {type(spec).__name__} has no tensor parallelism, but tp is {tp}: set tp to 1 and raise shard"
        )
    plan: dict[str, ParallelStyle] = spec.tensor_plan(tp)
    return plan


def apply_tp(model: nn.Module, plan: dict[str, ParallelStyle], device_mesh: DeviceMesh) -> None:
    """Split the model's modules over the dimension tp, in place; names that match no module here are ignored.

    Parameters that several modules share stay shared; the plan must split them alike.
    """
    from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

    first_names: dict[nn.Parameter, str] = {}
    tied = {
        name: first
        for name, param in model.named_parameters(remove_duplicate=False)
        if (first := first_names.setdefault(param, name)) != name
    }
    mesh = device_mesh["tp"]  # one object: what is compiled for a block serves others with the same mesh
    for pattern, style in plan.items():
        for name, module in model.named_modules():
            if fnmatchcase(name, pattern):
                parallelize_module(module, mesh, style)
    for name, first in tied.items():
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, model.get_parameter(first))
