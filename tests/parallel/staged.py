"""One rank of a pipeline: what the tests of stages share."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.models import ModelSpec
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.models.stages import split_into_stages
from isthmus.parallel import ParallelDims, apply_fsdp, apply_tp, open_mesh, tensor_plan
from isthmus.parallel.pipeline import LocalStages

SIZES = {"hidden_size": 16, "num_layers": 5, "num_heads": 4, "vocab_size": 30, "sequence_length": 8}
SPECS = {"gpt_neox": GPTNeoX(**SIZES), "gpt_neo": GPTNeo(**SIZES, window_size=4)}


def staged(spec: ModelSpec, mesh: ParallelDims, stages_per_rank: int = 1) -> tuple[nn.Module, LocalStages, DeviceMesh]:
    """This rank's part of the only worker's model, its stages, and the mesh."""
    device_mesh = open_mesh(mesh, 1)
    model = spec.build()
    stages = split_into_stages(spec, model, device_mesh.get_local_rank("pp"), mesh.pp, stages_per_rank)
    for stage in stages.modules.values():
        apply_tp(stage, tensor_plan(spec, mesh.tp), device_mesh)
        apply_fsdp(stage, mesh, device_mesh)
    return model, stages, device_mesh
