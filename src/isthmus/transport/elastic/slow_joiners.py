"""Time for a worker whose link is slow: without it, it would be behind again whenever it has caught up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event

from isthmus.transport.elastic.member_info import MemberInfo

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_SPARE = 1.5  # what took so long the first time is given so many times as long
_MIN_SPARE_SECONDS = 0.5


class SlowJoiners:
    """Delays the next sync until those have caught up who were too slow for it once.

    A state may take longer to arrive than the others take for a round. Then they commit meanwhile, and all of the state
    has changed when it has arrived. Who is behind right after it has caught up tells in its info how long that took:
    the download, and from there to the rendezvous. It downloads once more, from the commit of that rendezvous on; the
    others train on, but wait with their next sync until it is done. They come to it together, and soon after it: the
    stragglers' grace is for one another.
    """

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._joiners: dict[str, MemberInfo] = {}  # who was behind again at the last rendezvous
        self._end = self._spare_seconds = 0.0

    def note(self, members: dict[str, MemberInfo], leaders: list[str]) -> None:
        """Remember who is behind again at a rendezvous."""
        self._joiners = {
            name: info for name, info in members.items() if name not in leaders and info["download_seconds"] > 0
        }

    def start(self) -> None:
        """Start to count the time of their downloads: the sync of that rendezvous has committed."""
        if self._joiners:
            download_seconds = max(info["download_seconds"] for info in self._joiners.values())
            adopt_seconds = max(info["adopt_seconds"] for info in self._joiners.values())
            self._spare_seconds = _MIN_SPARE_SECONDS + _SPARE * adopt_seconds
            self._end = time.monotonic() + min(_SPARE * download_seconds + self._spare_seconds, self._max_seconds)

    def wait(self, is_serving: Callable[[], bool], stop: Event) -> None:
        """Wait until they have caught up, not for one that downloads nothing any more, or until told to stop."""
        quiet_since = start = time.monotonic()
        if start < self._end:
            _LOGGER.info(
                "this worker waits up to %.0f s for %s, whose link needs longer for the state than a round takes: "
                "raise outer.schedule.local_steps if workers join often",
                self._end - start,
                ", ".join(self._joiners),
            )
        while time.monotonic() < min(self._end, quiet_since + self._spare_seconds) and not stop.is_set():
            stop.wait(_POLL_SECONDS)
            quiet_since = time.monotonic() if is_serving() else quiet_since
        self._end = 0.0
