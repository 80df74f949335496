"""What one rank of a worker learns, all of its ranks go by; ranks are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.transport.base import Drift, RankLost, TransportError
from isthmus.transport.elastic import rank_consensus as consensus
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.elastic.rank_consensus import VoteResult
from isthmus.transport.worker_group import SINGLE_RANK, SingleRank

RENDEZVOUS = Rendezvous("m", {"w0": {"version": 1}})


class Threads:
    """The ranks of one worker."""

    def __init__(self, size):
        self.size, self.values, self.barrier = size, [None] * size, threading.Barrier(size)

    def each(self, call):
        """What `call(worker_group)` returns or raises, by rank."""

        def run(rank):
            try:
                return call(_Rank(self, rank))
            except TransportError as error:
                return type(error), str(error)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))


class _Rank(SingleRank):
    def __init__(self, threads, rank):
        self.threads, self.rank, self.size = threads, rank, threads.size

    def all_gather_object(self, value):
        self.threads.values[self.rank] = value
        self.threads.barrier.wait(10)
        values = list(self.threads.values)
        self.threads.barrier.wait(10)
        return values


class Connections:
    """The connections of one rank, which may fail."""

    def __init__(self, fails=False):
        self.fails, self.closed = fails, False

    def peers(self, found, names, weights):
        if self.fails:
            raise TransportError("worker w1 did not come")
        return type("Peers", (), {})()

    def close(self):
        self.closed = True


def test_the_first_rank_alone_comes_to_the_rendezvous_and_all_know_of_it():
    came = []
    all_found = Threads(3).each(
        lambda group: consensus.rendezvous(group, lambda: came.append(group.rank) or RENDEZVOUS)
    )
    assert all_found == [RENDEZVOUS] * 3
    assert came == [0]


def test_where_the_first_rank_finds_nobody_all_know_why():
    def come():
        raise TransportError("the lighthouse is gone")

    problems = Threads(2).each(lambda group: consensus.rendezvous(group, come))
    assert problems == [(TransportError, "the lighthouse is gone")] * 2


def connect(connections):
    return Threads(2).each(
        lambda group: consensus.connect_peers(group, connections[group.rank], RENDEZVOUS, ["w0"], [1.0])
    )


def test_a_sync_is_left_by_all_ranks_where_one_cannot_connect():
    connections = [Connections(), Connections(fails=True)]
    assert connect(connections) == [(TransportError, "worker w1 did not come")] * 2
    assert all(each.closed for each in connections), "those they wait for must not wait for them"


def test_peers_know_the_ranks_of_their_worker():
    connections = [Connections(), Connections()]
    assert [each.worker_group.rank for each in connect(connections)] == [0, 1]
    assert not any(each.closed for each in connections)


@pytest.mark.parametrize(
    ("seen", "end"),
    [
        ([True, True], VoteResult(committed=True)),
        ([TransportError("cut off"), True], VoteResult(committed=True)),
        ([False, TransportError("cut off")], VoteResult()),
        (
            [TransportError("cut off"), Drift([1], "worker 1 differs")],
            VoteResult(drift="worker 1 differs", drifted=True),
        ),
        ([TransportError("cut off"), TransportError("timed out")], (TransportError, "cut off")),
    ],
    ids=str,
)
def test_what_one_rank_sees_of_a_vote_holds_for_all(monkeypatch, seen, end):
    def of_one_rank(peers, ok, fingerprint):
        outcome = seen[peers.own_rank]
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    monkeypatch.setattr(consensus.peers_of_one_rank, "vote", of_one_rank)

    def vote(group):
        return consensus.vote_as_one(group, type("Peers", (), {"own_rank": group.rank, "rank": 1})(), True, b"")

    assert Threads(2).each(vote) == [end] * 2


def test_a_lost_rank_is_no_vote(monkeypatch):
    def of_one_rank(peers, ok, fingerprint):
        raise RankLost([1], "rank 1 is gone")

    monkeypatch.setattr(consensus.peers_of_one_rank, "vote", of_one_rank)
    with pytest.raises(RankLost):
        consensus.vote_as_one(SINGLE_RANK, None, True, b"")


def fetched(parts, monkeypatch):
    """By each rank, where its donors give it this part, or fail."""

    def fetch(donors, want, **terms):
        part = parts[donors[0]]
        if isinstance(part, str):
            raise TransportError(part)
        return type("Fetched", (), {"state": part})()

    monkeypatch.setattr(consensus, "fetch", fetch)
    return Threads(len(parts)).each(lambda group: consensus.fetch_state(group, [group.rank]))


def test_parts_of_one_state_are_taken_over_at_the_step_of_the_last_one_asked(monkeypatch):
    states = fetched([{"consistency": "a", "inner_steps": 7}, {"consistency": "a", "inner_steps": 9}], monkeypatch)
    assert states == [({"consistency": "a", "inner_steps": 9}, "")] * 2


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            [{"consistency": "a", "inner_steps": 7}, {"consistency": "b", "inner_steps": 7}],
            "the run went on between",
        ),
        ([{"consistency": "a", "inner_steps": 7}, "all donors are gone"], "all donors are gone"),
    ],
)
def test_parts_that_do_not_belong_together_are_not_taken_over(monkeypatch, parts, problem):
    for state, said in fetched(parts, monkeypatch):
        assert state is None
        assert said.startswith(problem)
