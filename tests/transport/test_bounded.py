import gc
import threading
import time
import weakref

import pytest

from isthmus.transport.bounded import BoundedCalls, NoAnswer


class Thing:
    pass


def test_results_and_errors_are_the_calls_own():
    calls = BoundedCalls()
    assert calls.within(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.within(10, lambda: 1 // 0)


def test_a_call_may_have_a_timeout_of_its_own():
    def call():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        BoundedCalls().within(10, call)


def test_a_call_that_hangs_is_left_behind():
    calls, end = BoundedCalls(), threading.Event()
    start = time.monotonic()
    with pytest.raises(NoAnswer, match=r"no answer within 0.1 s"):
        calls.within(0.1, lambda: end.wait(30))
    assert time.monotonic() - start < 10
    assert calls.within(10, lambda: 7) == 7
    end.set()


def test_cancel_ends_the_call_under_way_and_all_later_ones():
    calls, begun, end = BoundedCalls(), threading.Event(), threading.Event()

    def call():
        begun.set()
        end.wait(30)

    threading.Thread(target=lambda: (begun.wait(), calls.cancel())).start()
    with pytest.raises(NoAnswer, match="this worker has left"):
        calls.within(30, call)
    with pytest.raises(NoAnswer, match="this worker has left"):
        calls.within(30, end.wait)
    end.set()


def test_a_result_lives_no_longer_than_its_caller_wants():
    calls = BoundedCalls()
    kept = weakref.ref(calls.within(10, Thing))
    gc.collect()
    assert kept() is None
