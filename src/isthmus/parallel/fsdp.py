"""A worker's weights sharded over some of its ranks, by FSDP2."""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.core.fragment import block_list
from isthmus.core.types import UserError
from isthmus.parallel.mesh import ParallelDims


def apply_fsdp(model: nn.Module, dims: ParallelDims, device_mesh: DeviceMesh) -> None:
    """Shard the model's parameters over the dimension shard, block by block; after tensor parallelism, in place.

    Gradients become the mean over the ranks along that dimension. Blocks are those of the longest `nn.ModuleList`.
    Nothing happens where the dimension is 1.

    Raises:
        UserError: there is no GPU whose memory `cpu_offload` could free, or a parameter that FSDP2 cannot shard.
    """
    if dims.cpu_offload and device_mesh.device_type == "cpu":
        raise UserError("mesh: cpu_offload frees a GPU's memory, but there is no GPU here: set it to false")
    if dims.shard == 1:
        return
    from torch.distributed import fsdp  # takes a second to import

    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise UserError(f"mesh: shard cannot cut {name!r}, a single number: make it a tensor of shape [1]")
    options: dict[str, Any] = {"mesh": device_mesh["shard"], "reshard_after_forward": dims.reshard_after_forward}
    if dims.mixed_precision:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if dims.cpu_offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    _, blocks = block_list(model)
    for block in blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    if hasattr(model, "measure"):
        fsdp.register_fsdp_forward_method(model, "measure")  # it, too, gathers the weights that it computes with


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 gathered for forward passes without a backward pass; leave other models alone.

    Otherwise the next forward pass would not see how the shards have changed meanwhile.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whatever is sharded by it has imported it
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()
