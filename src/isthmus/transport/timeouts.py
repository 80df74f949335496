"""Calls into other libraries that may hang, bounded in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


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

    def call(self, seconds: float, function: Callable[[], Result]) -> Result:
        """Return the result of a function, or raise its exception, or `NoAnswer` after so many seconds."""
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
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise  # the call's own
            raise NoAnswer(f"no answer within {seconds:g} s") from None
        finally:
            self._pending = Future()  # or the result would live until the next call

    def cancel(self) -> None:
        """End the call under way and all later ones at once; may be called from any thread."""
        self._cancelled = True
        with suppress(InvalidStateError):
            self._pending.set_exception(NoAnswer("this worker has left"))
