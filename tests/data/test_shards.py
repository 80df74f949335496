"""Shards: every one is read once an epoch, whoever reads."""

from isthmus.data.shards import assign_shards


def test_an_assignment_is_everything_once():
    for num_shards, num_workers in [(1, 1), (7, 3), (3, 7), (8, 2), (1, 5)]:
        pieces = [
            piece for worker in range(num_workers) for piece in assign_shards(num_shards, 5, 2, worker, num_workers)
        ]
        parts = pieces[0]["parts"]
        assert sorted((piece["shard"], piece["part"]) for piece in pieces) == [
            (shard, part) for shard in range(num_shards) for part in range(parts)
        ]
        assert all(assign_shards(num_shards, 5, 2, worker, num_workers) for worker in range(num_workers))
