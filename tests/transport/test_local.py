import random
import threading
import time

import pytest
import torch

from isthmus.transport import PeerLost, TransportError
from isthmus.transport.local import Local, LocalWorld, run_workers

MBIT = 1e6


def run(world, function, **kwargs):
    return run_workers(world, function, timeout_seconds=20, **kwargs)


def test_identity_35_a_collective_ends_for_everybody_at_the_latest_start_plus_its_modelled_time():
    def worker(rank, transport):
        transport.advance(10.0 * rank)  # the slowest arrives at 20
        peers, times = transport.quorum(0), []
        for call in (
            lambda: peers.all_reduce_mean([torch.zeros(750_000)]),  # twice 2 parts of 1 MB up each link
            lambda: peers.all_gather([torch.zeros(250_000)]),  # 1 MB to 2 others
            lambda: peers.all_to_all([[torch.zeros(125_000)]] * 3),  # 2 parts of 0.5 MB up each link
        ):
            call()
            times.append(transport.now())
        return times

    for times in run(LocalWorld(3, 8 * MBIT, 0.25), worker):
        assert times == pytest.approx([20 + 4.0 + 0.25, 24.25 + 2.0 + 0.25, 26.5 + 1.0 + 0.25])


def test_uneven_links():
    fast, slow = 8 * MBIT, 4 * MBIT
    world = LocalWorld(2, [[0, fast], [slow, 0]], [[0, 0.1], [0.1, 0]])

    def worker(rank, transport):
        transport.quorum(0).all_gather([torch.zeros(250_000)])  # 1 MB over the slow link takes 2 s
        return transport.now()

    assert run(world, worker) == pytest.approx([2.1, 2.1])


def test_windows_of_long_links_bind():
    """A round trip of 0.1 s opens four connections, each of 1 MB a round trip: 40 MB/s, however wide the link is."""

    def worker(rank, transport):
        transport.quorum(0).all_gather([torch.zeros(10_000_000)])
        return transport.now()

    assert run(LocalWorld(2, 10_000 * MBIT, 0.05, window_bytes=1e6), worker) == pytest.approx([1.05, 1.05])


def test_a_rendezvous_takes_two_trips():
    def worker(rank, transport):
        transport.advance(rank)
        transport.commit(transport.quorum(0), True)
        return transport.now()

    world = LocalWorld(2, None, 0.25, has_rendezvous=True)
    world.recorded = []
    assert run(world, worker) == [1 + 3 * 0.25] * 2
    assert [collective.kind for collective in world.recorded] == ["rendezvous", "all_gather"]


def test_an_exchange_of_other_sizes_for_every_pair():
    """Rank r sends 100 r + 10 s bytes of value r to rank s, over 8,000 bits a second and then a tenth of them."""

    def worker(rank, transport):
        peers = transport.quorum(0)
        outgoing = [torch.full((100 * rank + 10 * to,), rank, dtype=torch.uint8) for to in range(3)]
        incoming = [torch.empty(100 * sender + 10 * rank, dtype=torch.uint8) for sender in range(3)]
        times = []
        for num_connections in (None, 1):
            peers.exchange(outgoing, incoming, num_connections)
            times.append(transport.now())
        assert [each.tolist() for each in incoming] == [[r] * (100 * r + 10 * rank) for r in range(3)]
        return times

    world = LocalWorld(3, 8000.0, 0.5, window_bytes=100.0)  # one connection moves 800 bits in a round trip of a second
    assert run(world, worker) == [pytest.approx([410 * 8 / 3200 + 0.5, 410 * 8 * (1 / 3200 + 1 / 800) + 1])] * 3


def on_a_communication_thread(transport, job):
    """What OuterLoop does: hand the time over with the work; the result brings back the time of its end."""
    submitted, ends = transport.now(), []

    def run_job():
        transport.wait_until(submitted)
        job()
        ends.append(transport.now())

    thread = threading.Thread(target=run_job)
    thread.start()

    def wait():
        thread.join()
        transport.wait_until(ends[0])

    return wait


@pytest.mark.parametrize(("computed", "end"), [(5.0, 18.0), (9.0, 19.0)])
def test_overlapped_compute_is_hidden_and_not_counted_twice(computed, end):
    """A sync of 8 s, submitted at 10, beside 5 or 9 s of training."""

    def worker(rank, transport):
        transport.advance(10.0)
        wait = on_a_communication_thread(transport, lambda: transport.quorum(0).all_gather([torch.zeros(250_000)]))
        transport.advance(computed)
        assert transport.now() == 10.0 + computed
        wait()
        return transport.now()

    assert run(LocalWorld(2, MBIT), worker) == pytest.approx([end, end])


def test_same_virtual_times_whatever_the_threads_do():
    def worker(rank, transport):
        times, noise = [], random.Random()
        for step in range(20):
            transport.advance(0.1 * (rank + 1))
            time.sleep(noise.random() / 1000)

            def job(step=step):
                time.sleep(noise.random() / 1000)
                transport.commit(transport.quorum(step), True)

            wait = on_a_communication_thread(transport, job)
            transport.advance(0.3)
            wait()
            times.append(transport.now())
        return times

    first, second = (run(LocalWorld(3, MBIT, 0.05), worker) for _ in range(2))
    assert first == second
    assert first[0] != first[2]


def test_weights_of_the_world():
    def worker(rank, transport):
        peers = transport.quorum(0)
        value = float("nan") if rank == 0 else float(rank)
        return peers.weights, peers.all_reduce_mean([torch.tensor([value])])[0].item()

    assert run(LocalWorld(3, weights=[0.0, 0.25, 0.75]), worker) == [([0.0, 0.25, 0.75], 0.25 + 1.5)] * 3


def test_kill_a_worker_while_its_peers_wait_for_it():
    world = LocalWorld(3)

    def worker(rank, transport):
        if rank == 2:
            time.sleep(0.1)  # the others wait in the collective by now
            world.kill(2)
            with pytest.raises(TransportError, match="worker 2 was killed"):
                transport.quorum(0)
            return "killed"
        peers = transport.quorum(0)
        for _ in range(2):  # at once, and later too
            with pytest.raises(PeerLost, match="worker 2 was killed") as error:
                peers.all_reduce_mean([torch.zeros(3)])
            assert error.value.ranks == [2]
        return "lost"

    assert run(world, worker) == ["lost", "lost", "killed"]


def test_kill_a_worker_in_a_pending_collective():
    world = LocalWorld(2)

    def worker(rank, transport):
        if rank == 1:
            time.sleep(0.1)
            world.kill(0)
            return None
        with pytest.raises(TransportError, match="worker 0 was killed") as error:
            transport.quorum(0).all_gather([torch.zeros(3)])
        return error.type

    assert run(world, worker) == [TransportError, None]


def test_leaving_is_noticed():
    def worker(rank, transport):
        transport.quorum(0).all_gather([torch.zeros(3)])
        if rank == 0:
            return
        with pytest.raises(PeerLost, match="worker 0 left"):
            transport.quorum(1).all_gather([torch.zeros(3)])

    run(LocalWorld(2), worker)


def test_refuse_a_commit():
    world = LocalWorld(2)
    world.refuse_commit(outer_step=1, rank=1)

    def worker(rank, transport):
        return [transport.commit(transport.quorum(step), True) for step in range(3)]

    assert run(world, worker) == [[True, False, True]] * 2


def test_a_lost_message_fails_that_collective_for_everybody_and_nothing_else():
    world = LocalWorld(3)
    world.lose_message(outer_step=1, rank=2)

    def worker(rank, transport):
        outcomes = []
        for step in range(3):
            peers = transport.quorum(step)
            if step == 1:
                with pytest.raises(TransportError, match="a message of worker 2 was lost") as error:
                    peers.all_reduce_mean([torch.ones(4)])
                assert error.type is TransportError, "nobody is gone"
            else:
                peers.all_reduce_mean([torch.ones(4)])
            outcomes.append(transport.commit(peers, step != 1))
        return outcomes

    assert run(world, worker) == [[True, False, True]] * 3


@pytest.mark.parametrize(("name", "size"), [("all_gather", 3), ("all_reduce_mean", 4)])
def test_workers_that_disagree_are_told_so(name, size):
    def worker(rank, transport):
        peers = transport.quorum(0)
        call = getattr(peers, name) if rank else peers.all_reduce_mean
        with pytest.raises(
            TransportError, match="workers disagree, in rank order they called: all_reduce of .12. bytes"
        ):
            call([torch.zeros(size if rank else 3)])

    run(LocalWorld(2), worker)


def test_run_workers_raises_the_first_error_and_lets_nobody_wait():
    def worker(rank, transport):
        if rank == 1:
            raise ValueError("the cause")
        transport.quorum(0).all_gather([torch.zeros(3)])  # would wait for ever

    with pytest.raises(ValueError, match="the cause"):
        run(LocalWorld(3), worker)


def test_run_workers_is_bounded():
    started = time.monotonic()

    def worker(rank, transport):
        if rank == 0:
            time.sleep(3)
        transport.quorum(0).all_gather([torch.zeros(3)])

    with pytest.raises(TransportError, match="workers 0, 1 still ran after 0.3 s"):
        run_workers(LocalWorld(2), worker, timeout_seconds=0.3)
    assert time.monotonic() - started < 2


def test_bytes_and_time_cost_nothing_alone():
    transport = Local(LocalWorld(1, MBIT, 1.0), 0)
    peers = transport.quorum(0)
    peers.all_reduce_mean([torch.ones(100)])
    assert transport.commit(peers, True)
    assert (transport.now(), peers.sent_bytes, peers.received_bytes) == (0.0, 0, 0)
