"""The real libp2p daemons, on loopback; workers are threads where that is enough, else real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hivemind_scenarios import LISTEN, alive, wait_for
from tests.transport.links import check_the_engine_is_not_waited_for, connect, everybody, leave, meet
from tests.transport.threads import together
from transport_contract import run_checks

from isthmus.core import UserError
from isthmus.transport import TransportError
from isthmus.transport.address import free_port
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.matchmaking import MAX_INFO_BYTES
from isthmus.transport.hivemind.membership import HivemindMembership
from isthmus.transport.hivemind.node_settings import NodeSettings, lock_identity
from isthmus.transport.peers import vote
from isthmus.transport.trust import Trust

pytestmark = pytest.mark.processes

BUDGET = 10.0


@pytest.fixture(scope="module")
def zygote(the_zygote):
    return the_zygote.of("hivemind_scenarios")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """To make a key takes longer than anything else here, so they are kept."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def worker(keys):
    """Makes connected workers, and sees them off. The first is the initial peer of the others."""
    workers = []

    def connected(name, budget=BUDGET, **options):
        options = {"connect_seconds": 10, "grace_seconds": 60} | options
        of_node = {"listen": LISTEN}
        if workers and "initial_peers" not in options:
            of_node["initial_peers"] = workers[0].membership.addresses()
        of_node |= {field.name: options.pop(field.name) for field in fields(NodeSettings) if field.name in options}
        membership = HivemindMembership(name, "run", NodeSettings(keys / f"{name}.key", **of_node), **options)
        workers.append(connect(membership, budget))
        return workers[-1]

    yield connected
    for each in workers:
        leave(each)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three workers that nobody harms."""
    folder, workers = tmp_path_factory.mktemp("three"), []
    for name in "abc":
        peers = workers[0].membership.addresses() if workers else []
        workers.append(connect(HivemindMembership(name, "run", NodeSettings(folder / name, peers, LISTEN)), BUDGET))
    yield workers
    for each in workers:
        leave(each)


def rendezvous(*workers, wait_seconds=20):
    return together(*(lambda each=each: meet(each, wait_seconds, name=each.membership.name) for each in workers))


def sync(*workers):
    """Meet and gather the peers of all."""
    all_found = rendezvous(*workers)
    assert all(found == all_found[0] for found in all_found)
    return together(*(lambda each=each: everybody(each, all_found[0]) for each in workers))


def seen_by(worker):
    """The names of all that seem alive to a worker."""
    records, _ = worker.membership._node.call(worker.membership._presence.find_alive(set()))
    return [record.name for record in records.values()]


def failure(call):
    with pytest.raises(TransportError) as caught:
        call()
    return str(caught.value)


def test_all_hold_an_equal_rendezvous_and_every_rendezvous_has_its_own_id(three):
    ids = set()
    for _ in range(5):
        start = time.monotonic()
        all_found = rendezvous(*three)
        assert time.monotonic() - start < 5
        assert all(found == all_found[0] for found in all_found)
        assert [(name, info["name"]) for name, info in all_found[0].members.items()] == [(name, name) for name in "abc"]
        ids.add(all_found[0].id)
    assert len(ids) == 5


class Everybody:
    """A worker as a transport in which all take part alike: what the contract of transports can be tried on."""

    def __init__(self, worker):
        self.worker, self.now, self.num_workers = worker, time.monotonic, 0
        self.join, self.leave = (lambda replica: None), (lambda: None)  # the fixture does

    def quorum(self, outer_step):
        found = meet(self.worker)
        self.num_workers = len(found.members)
        return everybody(self.worker, found)

    def commit(self, peers, ok, fingerprint=b""):
        return vote(peers, ok, fingerprint)

    def wait_until(self, seconds):
        pass


@pytest.mark.parametrize("size", [2, 3])
def test_contract_of_transports(three, worker, size):
    members = three if size == 3 else [worker("a"), worker("b")]
    outcomes = together(*(lambda rank=rank: run_checks(Everybody(members[rank]), rank, size) for rank in range(size)))
    assert all(error == "" for outcome in outcomes for error in outcome.values()), outcomes


def test_some_of_those_who_met_form_a_sync(three):
    all_found = rendezvous(*three)
    weights = [0.0, 1.0]
    peers = together(
        *(lambda each=each: each.peer_group.peers(all_found[0], ["a", "c"], weights) for each in three[::2])
    )
    values = [float("nan"), 2.0]
    means = together(*(lambda p=p: p.all_reduce_mean([torch.tensor([values[p.rank]])]) for p in peers))
    assert [mean[0].item() for mean in means] == [2.0, 2.0]


def test_unequal_sizes_are_refused_by_all_and_the_next_sync_is_unharmed(three):
    peers = sync(*three)
    sizes = [1000, 1000, 2000]
    reasons = together(
        *(lambda p=p, n=n: failure(lambda: p.all_gather([torch.zeros(n)])) for p, n in zip(peers, sizes, strict=True))
    )
    assert all("do all workers run the same model" in reason or "gave up on" in reason for reason in reasons), reasons
    peers = sync(*three)
    totals = together(*(lambda p=p: p.all_reduce_mean([torch.tensor([float(p.rank)])]) for p in peers))
    assert [total[0].item() for total in totals] == [1.0] * 3


def test_one_that_does_not_come_to_the_collective_is_named(worker):
    peers = sync(*(worker(name, budget=4) for name in "ab"))
    start = time.monotonic()
    reason = failure(lambda: peers[1].all_gather([torch.zeros(3)]))
    assert "worker a did not come, though alive" in reason
    assert 3.9 < time.monotonic() - start < 8
    # what b had sent may come before the news that it gave up; then the next collective says so
    assert "gave up on worker a" in failure(lambda: [peers[0].all_gather([torch.zeros(3)]) for _ in range(2)])


def test_a_worker_alone_meets_itself(worker):
    alone = worker("a")
    start = time.monotonic()
    found = meet(alone, x=1)
    assert time.monotonic() - start < 3
    assert {name: info["x"] for name, info in found.members.items()} == {"a": 1}
    assert everybody(alone, found).all_reduce_mean([torch.ones(2)])[0].tolist() == [1.0, 1.0]
    assert failure(lambda: meet(alone, 0.2)) == "no rendezvous within 0.2 s: this worker saw no other one"


def test_a_majority_goes_on_without_a_straggler_and_the_straggler_alone_does_not(worker):
    a, b, c = (worker(name, grace_seconds=0.5) for name in "abc")
    all_found = rendezvous(b, c)
    assert list(all_found[0].members) == ["b", "c"]
    assert "waited for b, c" in failure(lambda: meet(a, 2))
    assert [list(found.members) for found in rendezvous(a, b, c)] == [["a", "b", "c"]] * 3


def test_one_who_left_is_not_waited_for(worker):
    a, b = worker("a"), worker("b")
    rendezvous(a, b)
    leave(b)
    leave(b)
    start = time.monotonic()
    assert list(meet(a, 20).members) == ["a"]
    assert time.monotonic() - start < 5
    assert "left" in failure(lambda: meet(b, 1))


def test_one_who_returns_under_its_key_is_met_again(worker):  # hivemind #455, #472
    a, b = worker("a"), worker("b")
    rendezvous(a, b)
    leave(b)
    again = worker("b")
    assert again.membership.peer_id == b.membership.peer_id
    assert [list(found.members) for found in rendezvous(a, again)] == [["a", "b"]] * 2


def test_a_first_peer_that_restarts_does_not_found_a_second_swarm(worker, tmp_path):  # hivemind #624
    settings = NodeSettings(tmp_path / "dht.key", listen=(f"/ip4/127.0.0.1/tcp/{free_port()}",))

    def first_peer():
        node = Node(settings)
        node.start(Trust(), 10)
        return node, node.call(node.addresses())

    node, addresses = first_peer()
    a = worker("a", initial_peers=addresses)
    node.stop()
    assert list(meet(a, 20).members) == ["a"]
    node, same = first_peer()
    assert same == addresses
    b = worker("b", initial_peers=addresses)
    try:
        wait_for(lambda: len(b.membership._node.call(b.membership._presence.find_alive(set()))[0]) == 2)
        assert [list(found.members) for found in rendezvous(a, b)] == [["a", "b"]] * 2
    finally:
        node.stop()


def test_a_peer_outside_the_list_takes_part_in_nothing(worker, tmp_path):
    listed = {}
    for name in "ab":  # keys exist before the run, so that the list can be written
        member = worker(name, initial_peers=[])
        listed[name] = member.membership.peer_id
        leave(member)
    allowed = list(listed.values())
    open_door = worker("door", initial_peers=[])  # a first peer that lets everybody into the DHT
    addresses = open_door.membership.addresses()
    a, b = (worker(name, initial_peers=addresses, allowed_peers=allowed) for name in "ab")
    outsider = worker("outsider", initial_peers=addresses)
    all_found, refusal = [], []
    thread = threading.Thread(target=lambda: refusal.append(failure(lambda: meet(outsider, 1))))
    thread.start()
    while thread.is_alive():
        all_found += rendezvous(a, b)
    assert all(list(found.members) == ["a", "b"] for found in all_found)
    assert "no majority" in refusal[0]
    peers = together(*(lambda each=each: everybody(each, all_found[-1]) for each in (a, b)))

    node = outsider.membership._node
    assert not node.call(node.ping(a.membership.peer_id)), "the DHT of a member is closed to it as well"
    gathered = together(*(lambda p=p: p.all_gather([torch.tensor([p.rank])]) for p in peers))
    assert [[t.item() for (t,) in each] for each in gathered] == [[0, 1], [0, 1]]
    with pytest.raises(UserError, match="no initial peer answered for 1 s"):
        worker("stranger", initial_peers=a.membership.addresses(), connect_seconds=1)


def test_an_allowed_peer_that_uses_another_ones_name_is_not_met(worker):
    a = worker("a")
    thief = worker("b")
    of_thief = thief.membership
    of_thief.name = of_thief._matchmaker._name = of_thief._presence._name = "a"
    of_thief._node.call(of_thief._presence.announce())
    results = together(lambda: meet(a, 3, real=True), lambda: meet(thief, 3, real=False))
    assert [list(found.members) for found in results] == [["a"]] * 2
    assert [found.members["a"]["real"] for found in results] == [True, False], "each is alone"


def test_two_workers_of_one_name_are_told_apart_at_once(worker, tmp_path):
    a = worker("a")
    double = HivemindMembership("a", "run", NodeSettings(tmp_path / "other.key", a.membership.addresses(), LISTEN))
    with pytest.raises(UserError, match="another worker calls itself a"):
        connect(double)


def test_an_info_that_is_too_large_is_refused_here(three):
    with pytest.raises(ValueError, match=f"at most {MAX_INFO_BYTES}"):
        meet(three[0], 1, x="x" * MAX_INFO_BYTES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_peers": ["10.0.0.1:4000"]}, "'10.0.0.1:4000' is no multiaddr"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/4000"]}, "lacks its peer id"),
        ({"allowed_peers": ["bob"]}, "'bob' is no peer id"),
        (
            {"initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWD1B36vXiCyYFtweVWtEFw7bN81Rfq89EcPfS8isdwJsb"]},
            "no initial peer answered for 1 s .*tcp/1/.*: is isthmus dht running there",
        ),
        ({"listen": ["/ip4/192.0.2.77/tcp/0"]}, "are these addresses of this machine"),
    ],
)
def test_bad_settings_are_one_line(worker, options, message):
    with pytest.raises(UserError, match=message) as caught:
        worker("a", **({"connect_seconds": 1} | options))
    assert "\n" not in str(caught.value)


def test_an_identity_is_free_a_moment_after_its_process_was_killed(keys):
    path = keys / "of a killed one.key"
    held = lock_identity(path)
    threading.Timer(0.3, held.close).start()
    lock_identity(path).close()


def test_identity_in_use_or_damaged(worker, keys):
    worker("a")
    with pytest.raises(UserError, match=r"a\.key is in use"):
        worker("a")
    (keys / "broken.key").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"broken\.key is damaged"):
        worker("broken")


def test_port_in_use(worker):
    port = free_port()
    worker("a", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
    with pytest.raises(UserError, match=f"port {port} is in use"):
        worker("b", listen=[f"/ip4/127.0.0.1/tcp/{port}"], connect_seconds=1)


def test_clock_off_by_a_minute(zygote, tmp_path):
    ended = zygote.run("clock_is_wrong", 2, folder=str(tmp_path))
    assert "clock differs" in ended[1].result, ended[1]


@pytest.mark.parametrize(("how", "budget", "seconds"), [("SIGKILL", 12, 3.0), ("SIGSTOP", 9, 5.0)])
def test_a_worker_lost_in_the_middle_of_an_exchange(zygote, tmp_path, how, budget, seconds):
    ended = zygote.run("lose_a_worker", 3, victim=1, how=how, budget=budget, folder=str(tmp_path))
    for survivor in (ended[0], ended[2]):
        result = survivor.result
        assert survivor.code == 0, survivor.error
        assert "w1" in result["reason"]
        assert result["noticed"] < seconds
        assert result["again"].endswith(result["reason"].partition("failed: ")[2]), "and at once when asked again"
        assert result["names"] == ["w0", "w2"]
        assert result["mean"] == 1.0
    daemon_pid = (tmp_path / "struck").read_text().split()[2]
    wait_for(lambda: not alive(int(daemon_pid)))


def test_one_who_dies_waiting_and_returns_at_once_is_met(zygote, tmp_path):  # hivemind #519
    ended = zygote.run("die_while_waiting", 3, folder=str(tmp_path))
    assert [each.code for each in ended] == [0, -signal.SIGKILL, 0], ended
    for survivor in (ended[0], ended[2]):
        assert survivor.result == {"ranks": {"w0": 0, "w1": 2}, "mean": 1.0}


def test_a_program_that_ends_leaves_no_daemon(zygote, tmp_path):
    (ended,) = zygote.run("forgets_to_leave", 1, whole_end=True, folder=str(tmp_path))
    assert ended.code == 0
    wait_for(lambda: not alive(ended.result))


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_daemon(three):
    daemon = three[0].membership._node.p2p._child.pid
    assert os.getsid(daemon) == daemon


def test_isthmus_dht_says_what_workers_need_and_ends_cleanly(worker, tmp_path):
    command = [sys.executable, "-m", "isthmus", "dht", "--listen", f"/ip4/127.0.0.1/tcp/{free_port()}"]
    command += ["--identity", str(tmp_path / "dht.key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        lines = [server.stdout.readline() for _ in range(3)]
        address = lines[1].partition("initial_peers=[")[2].strip().rstrip("]")
        members = [worker(name, initial_peers=[address]) for name in "ab"]
        assert [list(found.members) for found in rendezvous(*members)] == [["a", "b"]] * 2
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert server.stderr.read() == ""
    wait_for(lambda: not any(alive(int(child)) for child in children))


def test_who_has_to_catch_up_is_not_waited_for(worker):
    a, b = worker("a"), worker("b")
    rendezvous(a, b)
    b.membership.rest()
    start = time.monotonic()
    assert list(meet(a).members) == ["a"]
    assert time.monotonic() - start < 5

    def once_it_is_back():
        wait_for(lambda: "b" in seen_by(a))  # until then it rests, for all that the other one can know
        return meet(a)

    assert [list(found.members) for found in together(once_it_is_back, lambda: meet(b))] == [["a", "b"]] * 2


def test_those_who_are_left_do_not_wait_for_the_dht(worker):
    a, b, c = worker("a"), worker("b"), worker("c")
    rendezvous(a, b, c)
    check_the_engine_is_not_waited_for(a, b, c)
