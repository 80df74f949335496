"""The rules of an elastic world, without training; workers are threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tests.local_membership import LocalMembership, LocalRendezvousServer

from isthmus.core import UserError
from isthmus.transport.base import Behind
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


class Holder:
    """What a worker serves: where it is in the run."""

    def __init__(self, member):
        self.member = member

    def shared_state(self, wait_seconds):
        state = self.member.history.state_dict()
        return {"elastic_decided": state, "elastic": state, "inner_steps": self.member.position[-1]}


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(1, 5), (12, 5)], id="it has read its checkpoint"),  # and all others were killed, too
        pytest.param([(1, 5), (1, 6)], id="a sync was refused"),
    ],
)
def test_who_goes_on_without_a_commit_gives_away_where_it_is_now(places):
    """The others would be behind whenever they have caught up, and nobody could commit any more."""
    server = LocalRendezvousServer()
    donor, joiner = (ElasticTransport(LocalMembership(server, name), min_workers=2) for name in ("w0", "w1"))
    for worker in (donor, joiner):
        worker.join(Holder(worker.elastic))
    got, waiting = [], None
    with ThreadPoolExecutor(1) as pool:
        for version, outer_step in places:
            donor.elastic.load_state_dict({"version": version, "chain": f"after {version}", "contributed": {}})
            donor.elastic.ask_for(outer_step, None)
            waiting = waiting or pool.submit(donor.quorum, outer_step)
            with pytest.raises(Behind, match=f"w0 are at version {version}"):
                joiner.quorum(0)
            state = joiner.elastic.catch_up(10**6)
            joiner.elastic.load_state_dict(state["elastic"])
            got.append((joiner.elastic.history.version, state["inner_steps"]))
        for worker in (donor, joiner):
            worker.leave()
    assert got == places


def test_where_the_leader_is_dead_the_others_go_on_from_their_own_state():
    """It died while it waited at the engine, which tells of it all the same."""
    server = LocalRendezvousServer()
    workers = [
        ElasticTransport(LocalMembership(server, f"w{k}"), min_workers=2, sync_budget_seconds=6.0) for k in range(3)
    ]
    for worker in workers:
        worker.join(Holder(worker.elastic))
    *others, dead = workers
    both_are_behind = threading.Barrier(2)

    def catch_up(worker):
        with pytest.raises(Behind, match="w2 are at version 1"):
            worker.quorum(0)
        both_are_behind.wait(20)
        server.kill("w2")
        worker.elastic.load_state_dict(worker.elastic.catch_up(10**6)["elastic"])
        return sorted(worker.quorum(0).weights), worker.elastic.history.version

    with ThreadPoolExecutor(3) as pool:
        dead.elastic.load_state_dict({"version": 1, "chain": "after 1", "contributed": {}})
        waiting = pool.submit(dead.quorum, 0)
        time.sleep(0.1)  # it waits for a majority
        dead._link.close()
        assert list(pool.map(catch_up, others)) == [([0.5, 0.5], 0)] * 2
        for worker in workers:
            worker.leave()
        waiting.exception()


@pytest.mark.parametrize("resumes", [True, False])
def test_who_has_a_checkpoint_does_not_wait_for_everybody_for_long(resumes):
    """Two of three that were killed come back: they are enough, and a new run would wait for the third."""
    server, options = LocalRendezvousServer(), {"expected_workers": 3, "sync_budget_seconds": 0.5, "resumes": resumes}
    workers = [ElasticTransport(LocalMembership(server, name), **options) for name in ("w0", "w1")]
    for worker in workers:
        worker.join(None)
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(worker.quorum, 0) for worker in workers]
        done, _ = wait(meetings, 3.0)
        assert len(done) == (2 if resumes else 0)
        for worker in workers:
            worker.leave()


class Foreign(LocalMembership):
    """A member of another kind: it tells what the test wants."""

    def __init__(self, server, name):
        super().__init__(server, name)
        self.told = {}

    def rendezvous(self, info, *rest):
        return super().rendezvous(self.told, *rest)


FOREIGN = {
    "the doctor's": {"links": [], "groups": []},
    "nothing": {},
    "a version that is no number": "version",
    "a speed that is none": "speed",
    "no address": "links",
}


@pytest.mark.parametrize("told", FOREIGN.values(), ids=FOREIGN)
def test_who_tells_something_foreign_is_named_and_ignored(told, caplog):
    caplog.set_level("INFO", "isthmus")
    server = LocalRendezvousServer(grace_seconds=5.0)
    workers = [ElasticTransport(LocalMembership(server, name), min_workers=2) for name in ("w0", "w1")]
    foreign = Foreign(server, "foreign")
    for worker in workers:
        worker.join(None)
    if isinstance(told, str):
        whole = workers[0].elastic._info([""])
        foreign.told = whole | {told: [{"address": "nowhere", "key": "none"}] if told == "links" else float("nan")}
    else:
        foreign.told = told
    foreign.connect(None)
    try:
        with ThreadPoolExecutor(3) as pool:
            pool.submit(foreign.rendezvous, {}, 5.0)
            found = list(pool.map(lambda worker: worker.quorum(0), workers))
        assert [peers.size for peers in found] == [2, 2]
        assert sum("ignores foreign: " in line for line in caplog.messages) == 2  # each worker once
    finally:
        foreign.leave()
        for worker in workers:
            worker.leave()


def test_of_two_configurations_the_usual_one_goes_on_and_the_other_says_why(caplog):
    caplog.set_level("INFO", "isthmus")
    server = LocalRendezvousServer(grace_seconds=5.0)
    configs = [{"lr": "1"}, {"lr": "1"}, {"lr": "2"}]
    workers = [
        ElasticTransport(LocalMembership(server, f"w{k}"), config, min_workers=2, expected_workers=2)
        for k, config in enumerate(configs)
    ]
    for worker in workers:
        worker.join(None)
    try:
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(worker.quorum, 0) for worker in workers]
            assert [future.result().size for future in waiting[:2]] == [2, 2]
            with pytest.raises(UserError, match="workers differ in lr: the others has 1, w2 has 2"):
                waiting[2].result()
        assert any("w0: ignores w2: it has another configuration" in line for line in caplog.messages)
    finally:
        for worker in workers:
            worker.leave()


def test_who_claims_a_speed_leaves_the_others_their_steps():
    worker = ElasticTransport(LocalMembership(LocalRendezvousServer(), "w0")).elastic
    for speeds, share in [({"w0": 2.0, "w1": 4.0}, 0.5), ({"w0": 2.0, "w1": 1e9}, 1 / 32), ({"w0": 4.0, "w1": 2.0}, 1)]:
        worker._speeds = speeds
        assert worker.relative_speed == share


def test_all_judge_alike_whether_enough_are_there():
    """A new run waits for three; the clock of one of the two who are there says that it is no new run any more."""
    server = LocalRendezvousServer(grace_seconds=0.1)
    early, late = workers = [
        ElasticTransport(LocalMembership(server, name), min_workers=1, expected_workers=3) for name in ("w0", "w1")
    ]
    for worker in workers:
        worker.join(None)
    early.elastic._start_deadline = 0.0
    try:
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(worker.quorum, 0) for worker in workers]
            time.sleep(1.0)
            assert not any(future.done() for future in waiting)
            late.elastic._start_deadline = 0.0
            assert [future.result().size for future in waiting] == [2, 2]
    finally:
        for worker in workers:
            worker.leave()
