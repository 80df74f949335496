"""How a worker's batches are shared out over its ranks."""

import pytest
import torch

from isthmus.core import UserError
from isthmus.parallel import ParallelDims
from isthmus.train.process import Process


def batch_of(first: int, size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + size), "y": -torch.arange(first, first + size)}


def processes(**mesh: int) -> list[Process]:
    made = ParallelDims(**mesh)
    return [Process(0, rank, mesh=made) for rank in range(made.num_ranks)]


def test_ranks_along_shard_have_disjoint_rows_and_the_others_the_same():
    rows = [process.own_rows(batch_of(0, 6))["x"].tolist() for process in processes(pp=2, shard=3)]
    assert rows == 2 * [[0, 1], [2, 3], [4, 5]]


def test_what_cannot_be_shared_out_evenly_is_left_out():
    """An empty slice would make the mean loss nan."""
    batches = [batch_of(0, 4), batch_of(4, 3), batch_of(7, 1)]
    shares = [process.own_share(batches) for process in processes(shard=2)]
    assert [[rows["x"].tolist() for rows in share] for share in shares] == [[[0, 1], [4]], [[2, 3], [5]]]
    assert [[rows["y"].tolist() for rows in share] for share in shares] == [[[0, -1], [-4]], [[-2, -3], [-5]]]
    (whole,) = processes()
    assert [rows["x"].tolist() for rows in whole.own_share(batches)] == [[0, 1, 2, 3], [4, 5, 6], [7]]
    assert whole.own_share([]) == []


def test_fewer_validation_samples_than_shards_are_one_line():
    with pytest.raises(UserError, match="mesh: shard is 2, and there are fewer validation samples: give more data"):
        processes(shard=2)[0].own_share([batch_of(0, 1)])
