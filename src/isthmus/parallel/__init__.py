"""Parallelism inside one worker: FSDP2, tensor parallelism and pipelines, as they would be without other workers."""

from isthmus.parallel.fsdp import apply_fsdp, reshard
from isthmus.parallel.gradient import WorkerGradScaler, clip_gradient, gradient_norm
from isthmus.parallel.mesh import Coordinates, ParallelDims, mean_over_shards, open_mesh, sum_over
from isthmus.parallel.tensor import apply_tp, tensor_plan

__all__ = [
    "Coordinates",
    "ParallelDims",
    "WorkerGradScaler",
    "apply_fsdp",
    "apply_tp",
    "clip_gradient",
    "gradient_norm",
    "mean_over_shards",
    "open_mesh",
    "reshard",
    "sum_over",
    "tensor_plan",
]
