"""Stopping a run by Ctrl-C or SIGTERM at any worker: all of them stop after the same turn."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Self

from isthmus.signals import handled_by
from isthmus.transport import PeerLost
from isthmus.transport.shared_notes import Notes

_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """The agreement of all ranks on their last turn; a turn is a training step or the end of the run.

    A rank that is signalled notes a request for all. A watcher thread in every rank sees it and publishes the
    turn that its rank has begun; from then on the rank begins no further turn before all have published. The last turn
    is the largest that was published. A rank that is stuck in a sync has published the turn of that sync, so the others
    go on until they come to it: nobody is waited for in vain.

    A second signal ends the process at once.

    Args:
        notes: reach all ranks.
        rank: of this process, one of `num_ranks` that stop together.
        timeout_seconds: for the others to publish.
        interrupt: called once somebody was signalled: it ends what could last.
    """

    def __init__(
        self,
        notes: Notes,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._notes, self._rank, self._timeout_seconds = notes, rank, timeout_seconds
        self._keys = [f"stop/{k}" for k in range(num_ranks)]
        self._changed = threading.Condition()
        self._interrupt = interrupt
        self._requested = self._closed = False
        self._current = 0
        self._published: int | None = None
        self._last: int | None = None
        self._error: PeerLost | None = None
        self._handling = ExitStack()  # of signals
        self._watcher = threading.Thread(target=self._watch, name="isthmus-stopping", daemon=True)

    def __enter__(self) -> Self:
        """Listen for signals (where this is the main thread) and requests."""
        self._handling.enter_context(handled_by(self._handle))
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers of signals."""
        self._handling.close()
        self._closed = True
        self._watcher.join(timeout=10 * _POLL_SECONDS)

    def may_start(self, turn: int) -> bool:
        """Return whether `turn` (counted from 1) is to be begun; wait for the others if that is not known yet.

        Raises:
            PeerLost: others did not publish in time, or the store is gone.
        """
        with self._changed:
            while self._published is not None and self._last is None and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._last is not None and turn > self._last:
                return False
            self._current = turn
            return True

    def request(self) -> None:
        """Ask all ranks to stop."""
        self._requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.request()

    def _watch(self) -> None:
        try:
            while not self._asked():
                if self._closed:
                    return
                time.sleep(_POLL_SECONDS)
            self._interrupt()
            with self._changed:
                self._published = self._current
            self._notes.set(self._keys[self._rank], str(self._published))
            self._finish(last=self._collect())
        except PeerLost as error:
            self._finish(error=error)
        except RuntimeError as error:  # of the store
            reason = str(error).splitlines()[0]
            self._finish(error=PeerLost([], f"the store is gone, and with it the process that holds it: {reason}"))

    def _asked(self) -> bool:
        if self._requested:
            self._notes.set("stop", "")
        return self._requested or self._notes.check(["stop"])

    def _collect(self) -> int | None:
        deadline = time.monotonic() + self._timeout_seconds
        while not self._closed:
            missing = [k for k, key in enumerate(self._keys) if not self._notes.check([key])]
            if not missing:
                return max(int(self._notes.get(key)) for key in self._keys)
            if time.monotonic() > deadline:
                raise PeerLost(missing, f"ranks {missing} did not answer the request to stop")
            time.sleep(_POLL_SECONDS)
        return None

    def _finish(self, last: int | None = None, error: PeerLost | None = None) -> None:
        with self._changed:
            self._last, self._error = last, error
            self._changed.notify_all()
