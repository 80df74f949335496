"""The device mesh: how many ranks a worker has, and where each of them stands."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.core.types import UserError

WORKER_DIMS = ("pp", "shard", "tp")  # of the mesh, inside one worker


class Coordinates(NamedTuple):
    """The place of one rank in the device mesh."""

    worker: int
    pp: int  # pipeline stage
    shard: int  # which slice of the worker's batch, and of its weights, by FSDP2
    tp: int  # which slice of the matrices that tensor parallelism splits


@dataclass(frozen=True)
class ParallelDims:
    """How one worker's ranks share its training: pp x shard x tp ranks, the last varying fastest."""

    pp: int = 1
    shard: int = 1
    tp: int = 1
    stages_per_rank: int = 1  # of a pipeline; with several, the 1F1B schedule is interleaved
    reshard_after_forward: bool = True  # FSDP2 frees gathered weights between a block's forward and backward pass
    mixed_precision: bool = False  # FSDP2 gathers and computes in bfloat16, reduces gradients in float32
    cpu_offload: bool = False  # FSDP2 keeps weights, gradients and optimizer state in CPU memory while a GPU computes

    def __post_init__(self) -> None:
        for name in (*WORKER_DIMS, "stages_per_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"mesh: {name} is {getattr(self, name)}; choose at least 1")
        if self.stages_per_rank > 1 and self.pp == 1:
            raise UserError(f"mesh: stages_per_rank is {self.stages_per_rank} without a pipeline; set pp to 2 or more")
        for name, option in (("mixed_precision", self.mixed_precision), ("cpu_offload", self.cpu_offload)):
            if option and self.shard == 1:
                raise UserError(f"mesh: {name} is FSDP2's, and shard is 1; set shard to 2 or more")

    def __str__(self) -> str:
        stages = f" x {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return f"pp {self.pp}{stages} x shard {self.shard} x tp {self.tp} ranks"

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one worker."""
        return self.pp * self.shard * self.tp

    @property
    def division(self) -> dict[str, int]:
        """The options that decide which part of the model each rank holds."""
        return {name: getattr(self, name) for name in (*WORKER_DIMS, "stages_per_rank")}

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank of the world."""
        worker, rank = divmod(rank, self.num_ranks)
        pp, rank = divmod(rank, self.shard * self.tp)
        return Coordinates(worker, pp, *divmod(rank, self.tp))


def open_mesh(dims: ParallelDims, num_workers: int, device_type: str = "cpu") -> DeviceMesh:
    """Make the device mesh [worker, pp, shard, tp] of all ranks; all of them call this after `init_process_group`.

    Raises:
        UserError: the world has another number of ranks.
    """
    world_size = dist.get_world_size()
    if world_size != num_workers * dims.num_ranks:
        raise UserError(
            f"mesh: {num_workers} workers of {dims} are "
            f"{num_workers * dims.num_ranks} ranks, but {world_size} were started: start as many, or change the mesh"
        )
    shape = (num_workers, dims.pp, dims.shard, dims.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=("worker", *WORKER_DIMS))


def sum_over(tensor: torch.Tensor, device_mesh: DeviceMesh, dim_names: tuple[str, ...]) -> torch.Tensor:
    """Return the sum of every rank's tensor along these dimensions of the mesh, on the device of `tensor`."""
    total = tensor.to(device_mesh.device_type, copy=True)
    for name in dim_names:
        group = device_mesh.get_group(name)
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def mean_over_shards(tensor: torch.Tensor, device_mesh: DeviceMesh) -> torch.Tensor:
    """Return the mean over the ranks that train on different slices of the worker's batch."""
    return sum_over(tensor, device_mesh, ("shard",)) / device_mesh.get_group("shard").size()
