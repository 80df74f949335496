"""The next batches, made while the model trains on this one."""

from __future__ import annotations

import threading
import weakref
from queue import Empty, Queue
from typing import Any, Self

from isthmus.data.base import Batches
from isthmus.inner.step import Batch

_GOODBYE_SECONDS = 10.0  # for a thread that hangs on the network when the program ends


class PrefetchedBatches:
    """A stream read ahead in a thread; its position is that of what was taken, not of what was read.

    Args:
        stream: nobody else may read it.
        ahead: batches.
    """

    def __init__(self, stream: Batches, ahead: int = 4) -> None:
        self.tokens_per_batch = stream.tokens_per_batch
        self._stream, self._ahead = stream, ahead
        self._position = stream.state_dict()
        self._stop: weakref.finalize[Any, Any] | None = None

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; raises what the stream raised."""
        if self._stop is None:
            self._start()
        item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        batch, self._position = item
        result: Batch = batch
        return result

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken."""
        return self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; what was read ahead is forgotten."""
        self.close()
        self._stream.load_state_dict(state_dict)
        self._position = self._stream.state_dict()

    def close(self) -> None:
        """End the thread, and go back to the position of what was taken; the next batch starts another thread."""
        if self._stop is not None:
            self._stop()
            self._stop = None
            self._stream.load_state_dict(self._position)

    def _start(self) -> None:
        self._queue: Queue[Any] = Queue(self._ahead)
        stopping = threading.Event()
        thread = threading.Thread(target=_fill, args=(self._stream, self._queue, stopping), daemon=True, name="data")
        thread.start()
        # also called at the end of the program: a thread in the middle of a library would take it down
        self._stop = weakref.finalize(self, _end, thread, self._queue, stopping)


def _fill(stream: Batches, queue: Queue[Any], stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            item: Any = (next(stream), stream.state_dict())
        except Exception as error:  # it is raised where the batch is asked for
            queue.put(error)
            return
        queue.put(item)


def _end(thread: threading.Thread, queue: Queue[Any], stopping: threading.Event) -> None:
    stopping.set()
    try:
        while True:  # it may be waiting for a free place
            queue.get_nowait()
    except Empty:
        thread.join(_GOODBYE_SECONDS)
