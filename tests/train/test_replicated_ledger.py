"""The ledger moves on the communication thread; what is read follows when the sync is finished, on all ranks alike."""

import pytest
from tests.data.number_order import Numbers

from isthmus.data import LeasedBatches, LeasesExhausted
from isthmus.train.lifecycle import ReplicatedLedger


def test_a_commit_is_gone_by_when_its_sync_is_finished():
    ledger = ReplicatedLedger(LeasedBatches(Numbers(), "a", batch_size=2), local_steps=1)
    ledger.commit({"a": ledger.propose()}, ["a"])
    with pytest.raises(LeasesExhausted):
        next(ledger.leased)
    ledger.apply()
    assert next(ledger.leased)["position"].tolist() == [0, 1]


def test_a_proposal_knows_the_commit_before():
    ledger = ReplicatedLedger(LeasedBatches(Numbers(), "a", batch_size=2), local_steps=1)
    ledger.commit({"a": ledger.propose()}, ["a"])
    ledger.propose()
    assert next(ledger.leased)["position"].tolist() == [0, 1]
