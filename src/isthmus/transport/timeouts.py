"""Calls into other libraries that may hang, bounded in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
LOOK_SECONDS = 0.1  # between two looks whether what waits for an answer gives up


class NoAnswer(RuntimeError):
    """A call took longer than it may, or was cancelled."""


class TimedCalls:
    """Makes each call on a thread of its own, which is left behind when the time is over.

    The clients of torch's stores and of the lighthouse cannot be interrupted, and some of their answers have no
    timeout: a stopped process at the other end would hold them for ever.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._pending: Future[Any] = Future()

    def call(
        self, seconds: float, function: Callable[[], Result], gives_up: Callable[[], bool] = lambda: False
    ) -> Result:
        """Return the result of a function, or raise its exception, or `NoAnswer` where that takes too long.

        That is after so many seconds, or soon after `gives_up()` has become true.
        """
        self._pending = future = Future[Result]()
        if self._cancelled:
            self.cancel()

        def run() -> None:
            with suppress(InvalidStateError):  # cancelled
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="isthmus-call", daemon=True).start()
        try:
            deadline = time.monotonic() + seconds
            while not future.done():
                if gives_up():
                    raise NoAnswer("given up")
                if time.monotonic() > deadline:
                    raise NoAnswer(f"no answer within {seconds:g} s")
                wait([future], min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            return future.result()
        finally:
            self._pending = Future()  # or the result would live until the next call

    def cancel(self) -> None:
        """End the call under way and all later ones at once; may be called from any thread."""
        self._cancelled = True
        with suppress(InvalidStateError):
            self._pending.set_exception(NoAnswer("this worker has left"))
