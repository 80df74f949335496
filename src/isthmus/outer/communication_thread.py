"""One communication thread: it fixes the order of collectives and hides them behind training."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from isthmus.core.streams import SideStream

Result = TypeVar("Result")
Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], torch.Event | None] | None]

_PATIENCE_SECONDS = 10.0  # how long the end of the program waits for a job that is still running


class CommunicationThread:
    """Runs jobs one after the other on a thread of its own, which ends with this object or with the program.

    On a GPU they have a stream of their own, and begin after what the submitting thread had begun there.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 (a value)
        self._jobs: Jobs = queue.SimpleQueue()
        self._side = SideStream(device)
        thread = threading.Thread(target=_run, args=(self._jobs, self._side), name="isthmus-communication", daemon=True)
        thread.start()
        # an interpreter that ends kills daemon threads in the middle of C++ code, which aborts the process
        self.close = weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job; its result or its exception arrives in the future."""
        future: Future[Result] = Future()
        self._jobs.put((future, job, self._side.mark()))
        return future

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job after those that are queued, or at once where the thread has ended; returns its result."""
        return self.submit(job).result() if self.close.alive else job()


def _end(jobs: Jobs, thread: threading.Thread) -> None:
    """Let the queued jobs run, but do not wait for ever."""
    jobs.put(None)
    thread.join(_PATIENCE_SECONDS)


@torch.no_grad()
def _run(jobs: Jobs, side: SideStream) -> None:
    while (item := jobs.get()) is not None:
        future, job, begun = item
        try:
            future.set_result(side.run(job, after=begun))
        except BaseException as error:
            future.set_exception(error)
        del item, future, job  # they hold a whole pseudo-gradient and its mean
