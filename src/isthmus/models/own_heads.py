"""A style of tensor parallelism for attention modules that count their heads themselves."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle


class OwnHeads(ParallelStyle):
    """Tells an attention module, which does not ask its matrices, how many heads this rank has."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.num_heads //= device_mesh.size()
        return module
