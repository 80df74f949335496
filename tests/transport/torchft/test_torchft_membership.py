"""The real lighthouse; workers are threads where that is enough, else real processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from tests.transport.links import check_the_engine_is_not_waited_for, connect, leave, meet, open_link
from tests.transport.threads import together
from transport_contract import CHECKS

from isthmus.core import UserError
from isthmus.transport import TransportError
from isthmus.transport.address import free_port
from isthmus.transport.timeouts import TimedCalls
from isthmus.transport.torchft.lighthouse import LighthouseConnection, lighthouse
from isthmus.transport.torchft.membership import TorchFTMembership
from isthmus.transport.trust import SECRET

pytestmark = pytest.mark.processes

BUDGET = 6.0


@pytest.fixture(scope="module")
def zygote(the_zygote):
    return the_zygote.of("torchft_scenarios")


@pytest.fixture
def address():
    with lighthouse("127.0.0.1:0", dead_seconds=3) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def worker(address):
    """Makes connected workers, and sees them off."""
    workers = []

    def connected(name, budget=BUDGET):
        workers.append(connect(TorchFTMembership(address, name, budget), budget))
        return workers[-1]

    yield connected
    for each in workers:
        leave(each)


def rendezvous(*workers, wait_seconds=20):
    return together(*(lambda each=each: meet(each, wait_seconds, name=name_of(each)) for each in workers))


def name_of(worker):
    return worker.membership.name


def rendezvous_until_there(late, *workers):
    """The rendezvous that `late` comes to, while the others come to one after the other."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, late)
        while name_of(late) not in (found := rendezvous(*workers)[0]).members:
            pass
        assert waiting.result().id == found.id
    return found


def gather(found, *workers, weights=None):
    names = sorted(name_of(each) for each in workers)
    weights = weights or [1 / len(names)] * len(names)
    return together(*(lambda each=each: each.peer_group.peers(found, names, weights) for each in workers))


def results(ended):
    assert [each.code for each in ended] == [0] * len(ended), ended
    return [each.result for each in ended]


@pytest.mark.parametrize("size", [2, 3])
def test_contract_of_transports(zygote, size):
    with lighthouse("127.0.0.1:0", min_workers=size) as port:
        ended = zygote.run("contract", size, size=size, lighthouse=f"127.0.0.1:{port}")
    for rank, outcomes in enumerate(results(ended)):
        failures = [f"worker {rank}: {check}: {outcomes[check]}" for check in CHECKS if outcomes[check]]
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("victim", "how"), [(0, "SIGKILL"), (2, "SIGKILL"), (0, "SIGSTOP"), (1, "SIGSTOP")])
def test_a_worker_lost_in_a_reduction_is_named_and_the_others_go_on_until_it_is_back(zygote, tmp_path, victim, how):
    with lighthouse("127.0.0.1:0", min_workers=2, grace_seconds=2, dead_seconds=3) as port:
        ended = zygote.run(
            "lose_a_worker",
            4,
            within_seconds=60,
            whole_end=True,
            victim=victim,
            how=how,
            lighthouse=f"127.0.0.1:{port}",
            budget=BUDGET,
            folder=str(tmp_path),
        )
    struck = float((tmp_path / "struck").read_text())
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        log = ended[rank].result["log"]
        assert ended[rank].code == 0
        first = next(i for i, entry in enumerate(log) if entry[0] == "refused")
        _, message, seen = log[first]
        assert f"worker w{victim}" in message
        assert "\n" not in message
        assert seen - struck < (4 if how == "SIGKILL" else BUDGET)
        after = [entry[1] for entry in log[first + 1 :] if entry[0] == "sync"]
        assert after[0] == [f"w{r}" for r in survivors], "the survivors go on"
        assert after[-1] == ["w0", "w1", "w2"], "and the lost one comes back"
        assert ended[rank].ended_at - ended[rank].result["ended_at"] < BUDGET, "nothing must hold up the exit"


def test_who_dies_while_it_waits_is_not_met(zygote, tmp_path):
    with lighthouse("127.0.0.1:0", min_workers=2, grace_seconds=30, dead_seconds=3) as port:
        ended = zygote.run("die_while_waiting", 3, lighthouse=f"127.0.0.1:{port}", folder=str(tmp_path))
    assert [each.code for each in ended] == [0, -signal.SIGKILL, 0], ended
    assert ended[0].result == ended[2].result == [["w0", "w2"], 1.0]


def test_rendezvous_are_equal_and_no_two_have_one_id(worker):
    a, b = worker("a"), worker("b")
    all_found = [rendezvous(a, b) for _ in range(3)]
    for one, other in all_found:
        assert one == other
        assert {name: info["name"] for name, info in one.members.items()} == {"a": "a", "b": "b"}
    assert len({one.id for one, _ in all_found}) == 3


def test_a_worker_alone(worker):
    a = worker("a")
    found = meet(a, 5, version=3)
    assert found.members["a"]["version"] == 3
    peers = a.peer_group.peers(found, ["a"], [1.0])
    assert peers.all_reduce_mean([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_a_group_is_kept_while_its_members_are_the_same(worker):
    a, b, c = worker("a"), worker("b"), worker("c")
    groups = []
    for members in [(a, b, c), (a, b, c), (a, c), (a, b, c)]:
        found = rendezvous(a, b, c)[0]
        peers = gather(found, *members)
        means = together(*(lambda p=p: p.all_reduce_mean([torch.tensor([float(p.rank)])])[0].item() for p in peers))
        assert means == [(len(members) - 1) / 2] * len(members)
        groups.append(a.peer_group._group)
    assert groups[0] is groups[1]
    assert len({id(group) for group in groups}) == 3


def test_weights_of_a_rendezvous(worker):
    a, b = worker("a"), worker("b")
    peers = gather(rendezvous(a, b)[0], a, b, weights=[0.0, 1.0])
    values = [torch.tensor([float("nan")]), torch.tensor([5.0])]
    means = together(*(lambda p=p, v=v: p.all_reduce_mean([v])[0].item() for p, v in zip(peers, values, strict=True)))
    assert means == [5.0, 5.0]


def test_stragglers_have_their_grace_and_come_to_the_next_rendezvous():
    with lighthouse("127.0.0.1:0", grace_seconds=1) as port:
        a, b, late = workers = [connect(TorchFTMembership(f"127.0.0.1:{port}", name)) for name in ("a", "b", "late")]
        start = time.monotonic()
        assert list(rendezvous(a, b)[0].members) == ["a", "b"]
        assert 1 <= time.monotonic() - start < 3
        assert list(rendezvous_until_there(late, a, b).members) == ["a", "b", "late"]
        for each in workers:
            leave(each)


def test_half_of_the_living_do_not_meet(worker):
    a, _ = worker("a"), worker("b")
    with pytest.raises(TransportError, match=r"no rendezvous within 0.5 s: too few came, of the workers that the"):
        meet(a, 0.5)


def test_who_takes_no_part_is_not_waited_for(worker):
    a, b = worker("a"), worker("b")
    found = rendezvous(a, b)[0]  # b finds that it has to catch up, which takes longer than the lighthouse's patience
    b.membership.rest()
    a.peer_group.peers(found, ["a"], [1.0])
    assert list(meet(a, 10).members) == ["a"]
    assert list(rendezvous_until_there(b, a).members) == ["a", "b"]


def test_who_left_is_not_waited_for(worker):
    a, b = worker("a"), worker("b")
    gather(rendezvous(a, b)[0], a, b)
    leave(b)
    leave(b)
    assert list(meet(a, 10).members) == ["a"]


def test_leave_ends_a_wait(worker):
    a, _ = worker("a"), worker("b")
    threading.Timer(0.3, a.membership.leave).start()
    start = time.monotonic()
    with pytest.raises(TransportError, match="this worker has left"):
        meet(a, 20)
    assert time.monotonic() - start < 5


def test_who_met_but_does_not_come_to_the_sync_is_named(worker):
    a, b = worker("a"), worker("b")
    found = rendezvous(a, b)[0]
    peers = a.peer_group.peers(found, ["a", "b"], [0.5, 0.5])
    with pytest.raises(TransportError, match="worker b did not come, though alive"):
        peers.all_gather([torch.zeros(1)])


def test_a_sync_that_ran_out_of_time_leaves_the_next_one_free(worker):
    a, b = worker("a", budget=1.0), worker("b", budget=1.0)
    peers = gather(rendezvous(a, b)[0], a, b)[0]
    with pytest.raises(TransportError, match="worker b did not come, though alive"):
        peers.all_reduce_mean([torch.zeros(10)])
    one, other = gather(rendezvous(a, b)[0], a, b)
    assert together(lambda: one.all_gather([]), lambda: other.all_gather([])) == [[[], []]] * 2


def test_twenty_failed_syncs_leave_nothing_behind(worker):
    a = worker("a", budget=1.0)
    held = []
    for _ in range(20):
        b = worker("b", budget=1.0)
        peers = gather(rendezvous(a, b)[0], a, b)[0]
        leave(b)
        with pytest.raises(TransportError, match="worker b"):
            peers.all_reduce_mean([torch.zeros(10)])
        held.append(threads_and_descriptors())
    deadline = time.monotonic() + 20  # what is closed is there for a moment: the longer, the busier the machine
    while any(now > first for now, first in zip(threads_and_descriptors(), held[0], strict=True)):
        assert time.monotonic() < deadline, f"after each sync: {held}; now: {threads_and_descriptors()}"
        time.sleep(0.1)


def threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_two_processes_of_one_name(worker):
    one, other, third = worker("a"), worker("a"), worker("b")
    expected = r"another process, at 127.0.0.1:\d+, calls itself a too"
    messages = []
    while not any(re.fullmatch(expected, message) for message in messages):  # until both had come when b did
        with ThreadPoolExecutor(2) as pool:
            twins = [pool.submit(meet, each, 1.5) for each in (one, other)]
            time.sleep(0.3)
            with suppress(TransportError):
                meet(third, 1)
            messages = [str(twin.exception()) for twin in twins]


def test_host_of_another_machine():
    with pytest.raises(UserError, match="203.0.113.7 is no address of this machine"):
        open_link(host="203.0.113.7")


def test_whoever_is_not_trusted_is_named_and_ignored(worker, address, caplog, monkeypatch):
    monkeypatch.setenv(SECRET, "a secret of this run")
    a, b = worker("a"), worker("b")
    monkeypatch.setenv(SECRET, "a secret of another run")
    stranger = worker("stranger")
    monkeypatch.delenv(SECRET)
    connection = LighthouseConnection(address, "junk")
    connection.connect(BUDGET)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(meet, stranger, 3)
        pool.submit(connection.ask, TimedCalls(), 3, "127.0.0.1:1", {"version": 10**9})
        time.sleep(0.3)
        found = rendezvous(a, b)[0]
    assert list(found.members) == ["a", "b"]
    peers = gather(found, a, b)
    assert together(*(lambda p=p: p.all_gather([torch.ones(1)]) for p in peers)) == [[[torch.ones(1)]] * 2] * 2
    connection.close()
    said = " ".join(caplog.messages)
    assert "a ignores stranger at the lighthouse: its key ed25519:" in said
    assert "a ignores junk at the lighthouse: it told something unreadable" in said


def test_a_lighthouse_that_dies_and_returns(zygote):
    port = free_port()
    process = zygote.start("serve", port=port)
    a, b = (connect(TorchFTMembership(f"127.0.0.1:{port}", name, BUDGET)) for name in "ab")
    before = rendezvous(a, b)[0]
    gather(before, a, b)
    os.kill(process, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"the lighthouse at 127.0.0.1:{port} does not answer"):
        rendezvous(a, b, wait_seconds=1)
    assert time.monotonic() - start > 1  # who trains on at once takes a thousand steps with nobody
    command = [sys.executable, "-m", "isthmus", "lighthouse", "--bind", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().endswith(f"--set outer.transport.lighthouse=127.0.0.1:{port}\n")
    met_again = []
    while not met_again:
        try:
            met_again = rendezvous(a, b, wait_seconds=3)
        except TransportError:
            continue
        if len(met_again[0].members) < 2:
            met_again = []  # one came before the lighthouse had heard of the other
    assert met_again[0] == met_again[1]
    peers = gather(met_again[0], a, b)
    means = together(*(lambda p=p: p.all_reduce_mean([torch.tensor([float(p.rank)])])[0].item() for p in peers))
    assert means == [0.5, 0.5]
    leave(a), leave(b)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


def test_those_who_are_left_do_not_wait_for_the_lighthouse(worker):
    a, b, c = worker("a"), worker("b"), worker("c")
    rendezvous(a, b, c)
    check_the_engine_is_not_waited_for(a, b, c)
