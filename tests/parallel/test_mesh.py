"""Ranks in a row-major order over worker, pp, shard and tp."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from isthmus.core import UserError
from isthmus.parallel import Coordinates, ParallelDims, mean_over_shards, open_mesh, sum_over


def test_the_last_coordinate_varies_fastest():
    mesh = ParallelDims(pp=2, shard=3, tp=2)
    assert mesh.num_ranks == 12
    assert mesh.coordinates(0) == Coordinates(0, 0, 0, 0)
    assert mesh.coordinates(1) == Coordinates(0, 0, 0, 1)
    assert mesh.coordinates(2) == Coordinates(0, 0, 1, 0)
    assert mesh.coordinates(6) == Coordinates(0, 1, 0, 0)
    assert mesh.coordinates(12 + 11) == Coordinates(1, 1, 2, 1)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("dim", ["pp", "shard", "tp"])
def test_every_dimension_is_at_least_one(dim: str, size: int):
    with pytest.raises(UserError, match=f"{dim} is {size}; choose at least 1"):
        ParallelDims(**{dim: size})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2, "stages_per_rank": 2}, "stages_per_rank is 2 without a pipeline"),
        ({"pp": 2, "stages_per_rank": 0}, "stages_per_rank is 0; choose at least 1"),
        ({"mixed_precision": True}, "mixed_precision is FSDP2's, and shard is 1"),
        ({"tp": 2, "cpu_offload": True}, "cpu_offload is FSDP2's, and shard is 1"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        ParallelDims(**options)


def look_around(mesh: ParallelDims) -> tuple[list[int], list[int], float, float]:
    device_mesh = open_mesh(mesh, num_workers=2)
    rank = torch.tensor(float(dist.get_rank()))
    same_place = dist.get_process_group_ranks(device_mesh.get_group("worker"))
    own_worker = sum_over(rank, device_mesh, ("pp", "shard", "tp")).item()
    assert rank.item() == dist.get_rank()  # not changed in place
    return device_mesh.get_coordinate(), same_place, own_worker, mean_over_shards(rank, device_mesh).item()


@pytest.mark.processes
def test_ranks_stand_where_the_mesh_says():
    mesh = ParallelDims(shard=2, tp=2)
    for rank, (coordinates, same_place, own_worker, shards) in enumerate(run_ranks(look_around, 8, mesh)):
        assert Coordinates(*coordinates) == mesh.coordinates(rank)
        assert same_place == [rank % 4, rank % 4 + 4]
        assert own_worker == (6 if rank < 4 else 22)
        assert shards == rank // 4 * 4 + 1 + rank % 2


def refused() -> str:
    with pytest.raises(UserError) as error:
        open_mesh(ParallelDims(pp=3), num_workers=2)
    return str(error.value)


@pytest.mark.processes
def test_a_mesh_that_does_not_multiply_up_to_the_ranks_is_refused():
    for message in run_ranks(refused, 2):
        assert "2 workers of pp 3 x shard 1 x tp 1 ranks are 6 ranks, but 2 were started" in message
        assert "\n" not in message
