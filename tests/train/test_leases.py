"""The ledger moves on the communication thread; what is read follows when the sync is finished, on all ranks alike."""

import pytest
from tests.data.numbers import Numbers

from isthmus.data import LeasedBatches, LeasesExhausted
from isthmus.train.leases import Leases


def test_a_commit_is_gone_by_when_its_sync_is_finished():
    leases = Leases(LeasedBatches(Numbers(), "a", batch_size=2), local_steps=1)
    leases.commit({"a": leases.propose()}, ["a"])
    with pytest.raises(LeasesExhausted):
        next(leases)
    leases.apply()
    assert next(leases)["position"].tolist() == [0, 1]


def test_a_proposal_knows_the_commit_before():
    leases = Leases(LeasedBatches(Numbers(), "a", batch_size=2), local_steps=1)
    leases.commit({"a": leases.propose()}, ["a"])
    leases.propose()
    assert next(leases)["position"].tolist() == [0, 1]
