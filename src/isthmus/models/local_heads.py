"""A style of tensor parallelism for attention modules that count their heads themselves."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override


class LocalHeads(ParallelStyle):
    """Tells an attention module how many heads this rank has."""

    @override
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.num_heads //= device_mesh.size()
        attention: nn.Module = module
        return attention
