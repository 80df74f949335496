"""After a loss those who are left meet over their own connections, and all of them ask the engine where not all can."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.local_membership import LocalMembership, LocalRendezvousServer
from tests.transport.links import break_connections, connect, leave, meet, open_link
from tests.transport.threads import together

from isthmus.transport import TransportError
from isthmus.transport.elastic.history import CommitHistory
from isthmus.transport.elastic.member import ElasticMember
from isthmus.transport.worker_group import SINGLE_RANK


class Engine(LocalMembership):
    """One that goes on counting the dead as alive, for so many seconds."""

    def __init__(self, server, name, forgets_seconds):
        super().__init__(server, name)
        self.forgets_seconds, self.num_asked = forgets_seconds, 0

    def rendezvous(self, info, *rest):
        self.num_asked += not info["meets_directly"]  # those who meet directly only look who else is there
        return super().rendezvous(info, *rest)


class World:
    """Workers a, b, c and so on, who have met."""

    def __init__(self, num_workers, forgets_seconds):
        self.server, self.workers = LocalRendezvousServer(grace_seconds=60), []
        self.forgets_seconds = forgets_seconds
        for name in "abcde"[:num_workers]:
            self.come(name)
        self.meet(self.workers)

    def come(self, name):
        self.workers.append(connect(Engine(self.server, name, self.forgets_seconds)))

    def meet(self, workers):
        """Have workers meet; returns the names that all of them found, and what they call this rendezvous."""
        begin = time.monotonic()
        all_found = together(*(lambda each=each: meet(each) for each in workers))
        assert all(found == all_found[0] for found in all_found)
        assert time.monotonic() - begin < self.server.grace_seconds / 4
        return list(all_found[0].members), all_found[0].id

    @property
    def asked(self):
        """How often each worker has asked the engine."""
        return [each.membership.num_asked for each in self.workers]

    def take_away(self, worker):
        """Break all of a worker's connections at once, as if it had died; the engine knows nothing of it."""
        break_connections(worker)
        others = [each for each in self.workers if worker.membership.name in each.peer_group.names]
        deadline = time.monotonic() + 10
        while any(each.peer_group.is_intact for each in others):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def world():
    worlds = []

    def made(num_workers, forgets_seconds=60.0):
        worlds.append(World(num_workers, forgets_seconds))
        return worlds[-1]

    yield made
    for each in worlds:
        for worker in each.workers:
            leave(worker)


def test_those_who_are_left_meet_at_once_without_the_engine(world):
    run = world(3)
    a, b, c = run.workers
    run.take_away(c)
    ids = set()
    for _ in range(3):
        names, found_id = run.meet([a, b])
        assert names == ["a", "b"]
        ids.add(found_id)
    assert len(ids) == 3
    assert run.asked == [1, 1, 1]


def test_whoever_waits_at_the_engine_when_somebody_dies_leaves_it(world):
    run = world(3)
    a, b, c = run.workers
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, a)
        time.sleep(0.3)
        run.take_away(c)
        assert meet(b).id == waiting.result().id
    assert run.asked == [2, 1, 1]


def test_when_the_engine_has_forgotten_the_lost_it_is_asked_again(world):
    run = world(3, forgets_seconds=1.0)
    a, b, c = run.workers
    run.take_away(c)
    run.meet([a, b])
    assert run.asked == [1, 1, 1]
    run.server.kill("c")
    time.sleep(1.2)
    assert run.meet([a, b])[0] == ["a", "b"]
    assert run.asked == [2, 2, 1]


def test_when_the_lost_one_comes_back_all_meet_at_the_engine_again(world):
    run = world(3)
    a, b, c = run.workers
    run.take_away(c)
    run.meet([a, b])
    run.come("c")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, run.workers[3])
        time.sleep(0.5)
        assert run.asked[:2] == [1, 1]
        assert run.meet([a, b]) == (["a", "b", "c"], waiting.result().id)
    assert run.asked[:2] == [2, 2]


def test_one_that_came_later_calls_the_rendezvous_as_the_others_do(world):
    run = world(3, forgets_seconds=1.0)
    run.take_away(run.workers[2])
    run.meet(run.workers[:2])
    run.server.kill("c")
    time.sleep(1.2)
    run.come("d")
    run.meet([*run.workers[:2], run.workers[3]])
    run.take_away(run.workers[1])
    assert run.meet([run.workers[0], run.workers[3]])[0] == ["a", "d"]
    assert run.asked == [2, 2, 1, 1]


def test_members_are_lost_one_after_the_other(world):
    run = world(5)
    for count, lost in enumerate(reversed(run.workers[3:]), 1):
        run.take_away(lost)
        assert len(run.meet(run.workers[:-count])[0]) == 5 - count
    assert run.asked == [1] * 5


def test_half_of_those_whom_the_engine_saw_do_not_go_on_alone(world):
    run = world(4)
    for lost in run.workers[2:]:
        run.take_away(lost)
        run.server.kill(lost.membership.name)
    assert run.meet(run.workers[:2])[0] == ["a", "b"]
    assert run.asked == [2, 2, 1, 1]


def test_where_one_does_not_come_all_ask_the_engine(world):
    run = world(4)
    a, b, c, d = run.workers
    run.take_away(d)
    run.server.kill("d")

    def late(worker):
        time.sleep(1.5)  # longer than those who came first wait for it
        return meet(worker)

    found = together(lambda: meet(a), lambda: meet(b), lambda: late(c))
    assert {each.id for each in found} == {found[0].id}
    assert list(found[0].members) == ["a", "b", "c"]
    assert min(run.asked[:3]) > 1


def test_who_has_to_catch_up_does_not_hold_the_others_up(world):
    run = world(3)
    a, b, c = run.workers
    run.take_away(c)
    run.server.kill("c")
    ahead = {"version": 1}
    assert [each.members["a"]["version"] for each in together(lambda: meet(a, **ahead), lambda: meet(b))] == [1, 1]
    assert run.asked == [1, 1, 1]
    together(lambda: meet(a, **ahead), lambda: meet(b))
    assert run.asked == [2, 2, 1]


def ports(worker):
    """The local ports of a worker's connections with its peers."""
    channels = worker.peer_group._group.channels.values()
    return {lane.connection.getsockname()[1] for channel in channels for lane in channel.lanes}


def test_those_who_are_left_keep_their_connections(world):
    run = world(3)
    a, b, c = run.workers
    for worker in run.workers:
        worker.peer_group._arrival_seconds = 20.0  # of which a quarter is for the connections of before
    before = ports(b)
    run.take_away(c)
    run.meet([a, b])
    kept = ports(b)
    assert kept < before
    run.come("c")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, run.workers[3])
        time.sleep(0.5)
        assert run.meet([a, b])[0] == list(waiting.result().members) == ["a", "b", "c"]
    assert kept < ports(b)


def test_those_who_lead_keep_their_group_when_one_comes_that_has_to_catch_up(world):
    run = world(2)
    a, b = run.workers
    before = a.peer_group._group
    run.come("c")
    c = run.workers[2]
    ahead = {"version": 1}
    found = together(lambda: meet(a, **ahead), lambda: meet(b, **ahead), lambda: meet(c))
    assert {each.id for each in found} == {found[0].id}
    assert list(found[0].members) == ["a", "b", "c"]
    assert a.peer_group._group is before
    assert before.lost is None
    assert c.peer_group.id == ""


def test_what_cannot_be_read_is_left_to_the_engine(world):
    run = world(3)
    a, b, c = run.workers
    run.take_away(c)
    run.server.kill("c")

    def mumble():
        with pytest.raises(TransportError):  # nor can this worker itself read it
            meet(b, version="one")

    found, _ = together(lambda: meet(a), mumble)
    assert list(found.members) == ["a"]
    assert min(run.asked[:2]) > 1


@pytest.mark.parametrize(
    ("min_workers", "needs_majority", "expected_workers", "regroups"),
    [(2, False, 4, False), (3, False, 4, True), (1, True, 4, True)],
)
def test_only_where_no_two_parts_can_commit(min_workers, needs_majority, expected_workers, regroups):
    membership = LocalMembership(LocalRendezvousServer(), "a")
    member = ElasticMember(
        membership, CommitHistory(None), {}, min_workers, needs_majority, expected_workers, 6.0, 60.0
    )
    link = open_link()
    member.connect(SINGLE_RANK, link)
    assert member._regroup._is_allowed == regroups
    leave(member)
