"""One communication thread: it fixes the order of collectives and hides them behind training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Background:
    """Runs jobs one after the other on a daemon thread of its own (daemon: a stuck peer cannot hold up exit)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="isthmus-communication", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job; its result or its exception arrives in the future."""
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """End the thread once the queued jobs are done."""
        self._jobs.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
