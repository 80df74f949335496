"""Workers share one line of samples: disjoint, reproducible, with exact positions."""

import copy

import numpy as np
import pytest
import torch

from isthmus.core import UserError
from isthmus.data import OrderedBatches
from isthmus.data.sample_order import NumberedDataSet
from tests.data.number_order import Numbers


class Rows:
    """Sample i is the number i; `seeds` show."""

    tokens_per_sample = 2

    def __init__(self, size: int, fingerprint: str = "rows") -> None:
        self.size, self.fingerprint = size, fingerprint

    def __len__(self) -> int:
        return self.size

    def read(self, indices, seeds):
        return {"row": torch.from_numpy(indices), "seed": torch.from_numpy(np.zeros(1) if seeds is None else seeds)}


def rows(size: int = 10, fingerprint: str = "rows"):
    return NumberedDataSet(Rows(size, fingerprint), Rows(4), {})


def take(stream, num_batches):
    return [number for _ in range(num_batches) for number in next(stream)["position"].tolist()]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_read_disjoint_samples_and_together_all(num_workers):
    streams = [OrderedBatches(Numbers(), 4, worker, num_workers) for worker in range(num_workers)]
    read = [take(stream, 5) for stream in streams]
    assert sorted(number for numbers in read for number in numbers) == list(range(20 * num_workers))


def test_identity_37_a_restored_position_goes_on_bitwise():
    stream = OrderedBatches(rows().sample_order(seed=3), 3, worker=1, num_workers=2)
    for _ in range(8):
        state = copy.deepcopy(stream.state_dict())
        resumed = OrderedBatches(rows().sample_order(seed=3), 3, worker=1, num_workers=2)
        resumed.load_state_dict(state)
        expected, got = next(stream), next(resumed)
        assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_after_two_workers_three_read_on_without_loss():
    two = [OrderedBatches(Numbers(), 4, worker, 2) for worker in range(2)]
    read = [number for stream in two for number in take(stream, 6)]
    three = [OrderedBatches(Numbers(), 4, worker, 3) for worker in range(3)]
    for stream in three:
        stream.load_state_dict(two[0].state_dict())
        read += take(stream, 2)
    assert sorted(read) == list(range(2 * 6 * 4 + 3 * 2 * 4))


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own():
    samples = rows().sample_order(seed=1)
    epochs = [samples.read(10 * epoch + np.arange(10)) for epoch in range(4)]
    assert all(sorted(epoch["row"].tolist()) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch["row"].tolist()) for epoch in epochs}) == 4
    assert len({seed for epoch in epochs for seed in epoch["seed"].tolist()}) == 40, "altered anew every time"
    assert not torch.equal(rows().sample_order(seed=2).read(np.arange(10))["row"], epochs[0]["row"])
    assert torch.equal(rows().sample_order(seed=1).read(np.arange(7, 13))["row"][3:], epochs[1]["row"][:3])


def test_validation_is_fixed():
    batches = rows().validation(batch_size=3, num_samples=100)
    assert [batch["row"].tolist() for batch in batches] == [[0, 1, 2], [3]]
    assert all(batch["seed"].tolist() == [0] for batch in batches)


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="batch_size is 0"):
        OrderedBatches(Numbers(), 0)
    with pytest.raises(UserError, match="batch_size is 11, and the data set has 10 training samples: lower it"):
        OrderedBatches(rows().sample_order(), 11)
    with pytest.raises(UserError, match="no training samples"):
        rows(0)
    state = OrderedBatches(rows().sample_order(), 3).state_dict()
    for other in (rows(11), rows(10, "others")):
        with pytest.raises(UserError, match="restore the data"):
            OrderedBatches(other.sample_order(), 3).load_state_dict(state)
    with pytest.raises(UserError, match="restore the data"):
        OrderedBatches(rows().sample_order(seed=1), 3).load_state_dict(state)
