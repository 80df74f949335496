"""Trackers get what goes to the metrics file. Training waits for none of them, and none can end it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol, Self

from isthmus.core import UserError
from isthmus.train.metrics import Totals

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # events
PATIENCE_SECONDS = 30.0  # at the end of a run, for what is not told yet
_GROUPS = {"step": "train"}  # what events are called in charts, where not as in the metrics file

_Job = Callable[["Tracker"], None]


class Tracker(Protocol):
    """Shows a worker's figures somewhere. All calls come from one thread, which is not the training thread."""

    name: str  # in the log line about its failure

    def begin(self, step: int, totals: Totals) -> None:
        """Begin with a run that goes on after `step`; `totals` are the worker's own, and grow as it trains."""

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Show one event of `isthmus.train.metrics`."""

    def close(self) -> None:
        """End: no more events come."""


class Trackers:
    """Hands events to all trackers, in a thread of its own; one that fails is logged once and gets nothing more."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        self._jobs = Queue[_Job | None](_MOST_WAITING)
        self._thread = Thread(target=self._work, name="isthmus-trackers", daemon=True) if trackers else None
        self._has_lost = False

    def __enter__(self) -> Self:
        """Start the thread."""
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Hand on what waits, for a while, and close all trackers."""
        if not self._thread:
            return
        with suppress(Full):
            self._jobs.put(None, timeout=PATIENCE_SECONDS)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            names = ", ".join(tracker.name for tracker in self._trackers)
            _LOGGER.warning("%s: not everything was passed on within %.0f s", names, PATIENCE_SECONDS)

    def begin(self, step: int, totals: Totals) -> None:
        """Begin with a run that goes on after `step`; comes before the first event."""
        self._put(lambda tracker: tracker.begin(step, totals))

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Hand an event on; return at once."""
        self._put(lambda tracker: tracker.take(event, values))

    def _put(self, job: _Job) -> None:
        if not self._thread:
            return
        try:
            self._jobs.put_nowait(job)
        except Full:
            if not self._has_lost:
                _LOGGER.warning("the trackers are slower than training: some events are in the metrics file only")
            self._has_lost = True

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            for tracker in list(self._trackers):
                self._tell(tracker, job)
        for tracker in list(self._trackers):
            self._tell(tracker, lambda tracker: tracker.close())

    def _tell(self, tracker: Tracker, job: _Job) -> None:
        try:
            job(tracker)
        except Exception as error:  # whatever it is, training goes on
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            _LOGGER.warning("%s failed (%s): it gets no more events, training goes on", tracker.name, reason)
            self._trackers.remove(tracker)
            with suppress(Exception):
                tracker.close()


def need(module: str) -> Any:
    """Import a module of an optional package, or raise a `UserError` that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"track: {error}: pip install 'isthmus[track]', or leave it out") from error


def numbers(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an event by name: "train/loss", "sync/all/norm" of the fragment "all", "eval/accuracy"."""
    group = f"sync/{values['fragment']}" if event == "sync" else _GROUPS.get(event, event)
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name != "step"
    }
