"""Real processes over gloo. BUDGET is the sync budget of the tests in which somebody is lost."""

import socket

import pytest
import torch
from tests.hosts import Hosts, skip_where_there_are_none

from isthmus.core import UserError
from isthmus.transport.rendezvous import initialise
from isthmus.transport.torch_dist import TorchDist

pytestmark = pytest.mark.processes

BUDGET = 6.0
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def results(ended):
    assert [worker.code for worker in ended] == [0] * len(ended), ended
    return [worker.result for worker in ended]


@pytest.mark.parametrize(
    ("size", "victim", "how"), [(3, 2, "SIGKILL"), (3, 0, "SIGKILL"), (3, 1, "SIGSTOP"), (2, 0, "SIGSTOP")]
)
def test_a_worker_lost_in_a_reduction_is_named_within_the_budget_and_the_others_exit(zygote, size, victim, how):
    ended = zygote.run("lose_a_worker", size, whole_end=True, within_seconds=30, victim=victim, how=how, budget=BUDGET)
    for worker in ended[:victim] + ended[victim + 1 :]:
        lost = worker.result
        assert lost["ranks"] == lost["again"] == [victim]
        assert f"worker {victim} (host {socket.gethostname()})" in lost["message"]
        assert "\n" not in lost["message"]
        reasons = ("broke", "gave up on") if how == "SIGKILL" else ("gave no sign of life", "gave up on")
        assert any(reason in lost["message"] for reason in reasons)
        assert lost["seconds"] < (4 if how == "SIGKILL" else BUDGET)
        assert worker.code == 3, "exit code chosen by the scenario"
        assert worker.ended_at - lost["ended_at"] < BUDGET, "a stuck collective must not hold up the exit"


@pytest.fixture
def hosts():
    skip_where_there_are_none()
    made = Hosts(["open", "filtered", "filtered"])
    yield made
    made.close()


def test_of_three_workers_one_needs_to_be_reachable(zygote, hosts):
    names = [hosts.name(number) for number in range(3)]
    ended = zygote.run("average_on_hosts", 3, hosts=names, address=hosts.addresses[0])
    assert [value for value, _ in results(ended)] == [1.0] * 3


def test_ranks_of_a_worker_have_the_ports_from_a_fixed_one_on(zygote, hosts):
    names = [hosts.name(number) for number in range(2)]
    ended = zygote.run("average_on_hosts", 4, hosts=names, address=hosts.addresses[0], ranks_per_worker=2, port=4000)
    assert results(ended) == [[1.0, 4000], [2.0, 4001], [1.0, 4000], [2.0, 4001]]


def test_a_worker_that_does_not_come_is_named_though_alive(zygote):
    lost, _ = results(zygote.run("come_late", 2, budget=2.0))
    assert lost["ranks"] == [1]
    assert "not done in 2 s, worker 1" in lost["message"]
    assert "did not come, though alive" in lost["message"]


def test_a_worker_that_left_is_named(zygote):
    lost, _ = results(zygote.run("leave_early", 2, budget=BUDGET))
    assert lost["ranks"] == [1]
    assert "left the run" in lost["message"]


def test_a_short_pause_is_forgiven(zygote):
    assert results(zygote.run("pause", 2, budget=9.0, seconds=1.5)) == [True, True]


def test_own_mistake_after_join_ends_the_process(zygote):
    for worker in zygote.run("raise_after_join", 2, whole_end=True, within_seconds=20):
        assert worker.code == 1
        assert "my own mistake" in worker.error


def test_different_configurations_are_found_at_join(zygote):
    configs = [{"model.seed": "1", "outer.schedule.local_steps": steps} for steps in ("50", "40", "50")]
    expected = "workers differ in outer.schedule.local_steps: workers 0, 2 have 50, worker 1 has 40"
    assert results(zygote.run("join_only", 3, configs=configs)) == [expected] * 3


def test_rank_0_whose_store_ends_with_it_waits_for_those_who_read_late(zygote):
    told = results(zygote.run("read_late", 2, configs=[{"a": "1"}, {"a": "2"}], seconds=0.5))
    assert told == ["workers differ in a: worker 0 has 1, worker 1 has 2"] * 2


def test_equal_configurations_join(zygote):
    configs = [{"model.seed": "1"}] * 2
    assert results(zygote.run("join_only", 2, configs=configs, expected_workers=2)) == [None] * 2


def test_wrong_number_of_ranks(zygote):
    expected = "the configuration says 4 workers, but 2 ranks started"
    assert results(zygote.run("join_only", 2, expected_workers=4)) == [expected] * 2


def test_missing_ranks(zygote):
    (message,) = results(zygote.run("join_only", 1, env={"WORLD_SIZE": "2"}, budget=0.2))
    assert message == "worker 1 did not join within 2 s: have all 2 ranks started, and can they reach MASTER_PORT?"


def test_port_in_use(zygote):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        (message,) = results(zygote.run("join_only", 1, env={"WORLD_SIZE": "2", "MASTER_PORT": port}))
    assert message == f"port {port} is in use on this machine: set MASTER_PORT to a free one"


def test_two_runs_in_one_process(zygote):
    assert results(zygote.run("two_runs_in_one_process", 2)) == [[0.5, 1.5]] * 2


def test_a_master_without_an_address_is_named_while_it_is_waited_for(monkeypatch, logged):
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="worker 1 cannot meet the others at nowhere.invalid:1"):
        initialise("gloo", 1.0, ["worker 0", "worker 1"])
    assert logged.messages[0].startswith("MASTER_ADDR: the name nowhere.invalid has no address (")


def test_where_torch_distributed_is_initialised_already(zygote):
    for outcomes, own_sum in results(zygote.run("contract_where_initialised_already", 2)):
        assert not any(outcomes.values())
        assert own_sum == 2.0


def test_collectives_beside_training_that_communicates_itself(zygote):
    assert results(zygote.run("overlap_with_training", 2)) == [[[0.5] * 20, 1.0]] * 2


@pytest.mark.usefixtures("alone")
def test_a_worker_alone_needs_no_launcher():
    transport = TorchDist(expected_workers=1)
    transport.join(None)
    peers = transport.quorum(0)
    assert (peers.rank, peers.size, peers.weights) == (0, 1, [1.0])
    assert peers.all_reduce_mean([torch.ones(3)])[0].tolist() == [1.0] * 3
    assert transport.commit(peers, True, b"12345678")
    assert not torch.distributed.is_initialized()
    transport.leave()


@pytest.mark.usefixtures("alone")
def test_alone_though_the_configuration_says_more():
    with pytest.raises(UserError, match="the configuration says 4 workers, but 1 rank started"):
        TorchDist(expected_workers=4).join(None)


@pytest.mark.usefixtures("alone")
def test_incomplete_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT not set: start with torchrun"):
        TorchDist().join(None)


def test_limits():
    assert TorchDist().limits.safe_to_overlap
    assert TorchDist(backend="nccl").limits.safe_to_overlap


def test_a_call_after_leaving_is_an_error(zygote):
    messages = results(zygote.run("call_after_leaving", 2))
    assert messages == ["all_reduce of sync 0: this worker has not joined, or has left"] * 2
