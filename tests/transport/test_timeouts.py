import gc
import threading
import time
import weakref

import pytest

from isthmus.transport.timeouts import NoAnswer, TimedCalls


class Thing:
    pass


def test_results_and_errors_are_the_calls_own():
    calls = TimedCalls()
    assert calls.call(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.call(10, lambda: 1 // 0)


def test_a_call_may_have_a_timeout_of_its_own():
    def call():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        TimedCalls().call(10, call)


def test_a_call_that_hangs_is_left_behind():
    calls, end = TimedCalls(), threading.Event()
    start = time.monotonic()
    with pytest.raises(NoAnswer, match=r"no answer within 0.1 s"):
        calls.call(0.1, lambda: end.wait(30))
    assert time.monotonic() - start < 10
    assert calls.call(10, lambda: 7) == 7
    end.set()


def test_cancel_ends_the_call_under_way_and_all_later_ones():
    calls, begun, end = TimedCalls(), threading.Event(), threading.Event()

    def call():
        begun.set()
        end.wait(30)

    threading.Thread(target=lambda: (begun.wait(), calls.cancel())).start()
    with pytest.raises(NoAnswer, match="this worker has left"):
        calls.call(30, call)
    with pytest.raises(NoAnswer, match="this worker has left"):
        calls.call(30, end.wait)
    end.set()


def test_a_result_lives_no_longer_than_its_caller_wants():
    calls = TimedCalls()
    kept = weakref.ref(calls.call(10, Thing))
    gc.collect()
    assert kept() is None
