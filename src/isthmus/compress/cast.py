"""Plain floating-point messages: fp32, bf16, fp16."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from isthmus.compress.base import Codec
from isthmus.compress.packing import from_bytes, to_bytes
from isthmus.core.types import Peers, State, Tensors

_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Send values in a narrower floating-point format (fp16: OpenDiLoCo, arXiv 2407.07852); sums stay float32.

    fp16 overflows above 65504: such a message is infinite, and the sync is refused.
    """

    format: Literal["float32", "bfloat16", "float16"] = "float32"
    row: ClassVar[int] = 1

    @property
    @override
    def row_bytes(self) -> int:
        return _FORMATS[self.format].itemsize

    @override
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return to_bytes(rows, _FORMATS[self.format])

    @override
    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        return from_bytes(payload, _FORMATS[self.format]).float()

    @override
    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        if self.format != "float32":
            return super().average(local, state, peers, with_residual)
        # lossless, so the transport's own all-reduce does it
        mean = peers.all_reduce_mean([tensor.float() for tensor in local])
        sent = local if with_residual else []
        return mean, [torch.zeros((), device=tensor.device).expand(tensor.shape) for tensor in sent]
