"""All workers stop after the same step, whoever is asked and however far apart they are."""

import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from isthmus.train.stopping import Stopping
from isthmus.transport import PeerLost


def train(stopping, until, wait=lambda step: None):
    """Begin steps as long as they are allowed; returns the last."""
    step = 0
    while step < until and stopping.may_start(step + 1):
        step += 1
        wait(step)
    return step


def run(num_workers, until, wait, ask):
    """Threads as workers; `wait(worker, step)` is what a step takes, `ask(stoppings)` runs beside."""
    store, ends = HashStore(), {}
    stoppings = [Stopping(store, worker, num_workers, timeout_seconds=10) for worker in range(num_workers)]

    def work(worker):
        with stoppings[worker] as stopping:
            ends[worker] = train(stopping, until, lambda step: wait(worker, step))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    ask(stoppings)
    for thread in threads:
        thread.join(20)
    return [ends[worker] for worker in range(num_workers)]


def test_nobody_asks_nobody_stops():
    assert run(3, 20, lambda worker, step: None, lambda stoppings: None) == [20, 20, 20]


@pytest.mark.parametrize("asked", [[0], [2], [0, 1, 2]])
def test_workers_of_unlike_speed_stop_after_the_same_step(asked):
    def ask(stoppings):
        time.sleep(0.1)
        for worker in asked:
            stoppings[worker].request()

    ends = run(3, 10_000, lambda worker, step: time.sleep(0.001 * (1 + worker)), ask)
    assert len(set(ends)) == 1
    assert 0 < ends[0] < 10_000


def test_a_worker_that_waits_in_a_sync_is_not_waited_for_in_vain():
    """Every fourth step is a barrier; the fast worker is stuck in it when the request comes."""
    barrier = threading.Barrier(2)

    def wait(worker, step):
        time.sleep(0.05 if worker else 0.0)
        if step % 4 == 0:
            barrier.wait(20)

    def ask(stoppings):
        time.sleep(0.3)
        stoppings[0].request()

    ends = run(2, 10_000, wait, ask)
    assert ends[0] == ends[1] < 10_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_and_the_second_one_ends_at_once(number):
    before = signal.getsignal(number)
    with Stopping(HashStore(), 0, 1, timeout_seconds=10) as stopping:
        assert stopping.may_start(1)
        signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
        assert train(stopping, 10_000, lambda step: time.sleep(0.001)) < 10_000
    assert signal.getsignal(number) is before


def test_who_does_not_answer_is_named():
    with Stopping(HashStore(), 0, 3, timeout_seconds=0.3) as stopping:
        stopping.request()
        with pytest.raises(PeerLost, match=r"ranks \[1, 2\] did not answer") as caught:
            train(stopping, 10_000, lambda step: time.sleep(0.001))
    assert caught.value.ranks == [1, 2]


class LostStore(HashStore):
    """A store whose host has died."""

    def check(self, keys):
        raise RuntimeError("recvValue failed\nframe #0")


def test_a_lost_store_is_one_line():
    with Stopping(LostStore(), 0, 2, timeout_seconds=10) as stopping, pytest.raises(PeerLost) as caught:
        train(stopping, 10_000, lambda step: time.sleep(0.001))
    assert str(caught.value) == "the store is gone, and with it the process that holds it: recvValue failed"
