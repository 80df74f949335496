"""The rules of an elastic world, without training; workers are threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.local_membership import LocalMembership, LocalRendezvousServer

from isthmus.transport.elastic.transport import ElasticTransport


class RecordedState:
    """A replicated_state that remembers what it was told; a proposal is a number of samples."""

    samples_per_step = 1

    def __init__(self):
        self.commits = []

    def check(self, worker, proposal):
        return "" if proposal in (0, 1, 2) else f"{worker}: no proposal"

    def gain(self, worker, proposal):
        return proposal

    def commit(self, proposals, contributors):
        self.commits.append((proposals, contributors))

    def state_dict(self):
        return {"commits": self.commits}


class World:
    """Two workers that have found one another."""

    def __init__(self):
        server = LocalRendezvousServer()
        self.states = [RecordedState(), RecordedState()]
        self.workers = [
            ElasticTransport(
                LocalMembership(server, f"w{k}"), min_workers=2, weighting="samples", replicated_state=replicated_state
            )
            for k, replicated_state in enumerate(self.states)
        ]
        self.together(lambda worker, _: worker.join(None), [None, None])

    def together(self, call, arguments):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, self.workers, arguments))

    def sync(self, outer_step, proposals):
        """Weights as each sees them."""

        def run(worker, proposal):
            peers = worker.quorum(outer_step, proposal)
            assert worker.commit(peers, True)
            return peers.weights

        return self.together(run, proposals)


@pytest.fixture
def world():
    world = World()
    yield world
    for worker in world.workers:
        worker.leave()


@pytest.mark.parametrize("proposals", [(1, 2), (2, None), (None, 1), (7, 2), (None, None)])
def test_the_replicated_state_moves_alike_for_all_whatever_they_propose(world, proposals):
    """A worker that has just caught up sends a sync again without a proposal of its own."""
    weights = world.sync(0, proposals)
    assert weights[0] == weights[1]
    assert world.states[0].commits == world.states[1].commits
    assert len(world.states[0].commits) == (proposals != (None, None))


def test_a_ledger_that_differs_is_drift(world):
    world.states[1].commits.append("something of its own")

    def run(worker, _):
        peers = worker.quorum(0, 1)
        return worker.commit(peers, True, b"equal"), worker.elastic.state_dict()["chain"]

    (committed, chain), (committed_too, drifted) = world.together(run, [None, None])
    assert not committed
    assert not committed_too
    assert (chain, drifted) == ("new", "drifted")


def test_without_a_proposal_there_is_no_weight(world):
    assert world.sync(0, (2, None)) == [[1.0, 0.0]] * 2
    assert world.states[1].commits == [({"w0": 2, "w1": None}, ["w0"])]


@pytest.mark.parametrize(("expected", "least"), [(None, 1), (1, 1), (2, 2), (3, 2), (4, 3)])
def test_more_than_half_must_be_there_unless_told_otherwise(expected, least):
    membership = LocalMembership(LocalRendezvousServer(), "w0")
    assert ElasticTransport(membership, expected_workers=expected).min_workers == least
    assert ElasticTransport(membership, expected_workers=expected, min_workers=1).min_workers == 1
