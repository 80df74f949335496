"""Time for a worker whose link is slow: without it, it would be behind again whenever it has caught up."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

from isthmus.transport.elastic.membership import Card

_POLL_SECONDS = 0.05
_SPARE = 1.5  # what took so long the first time is given so many times as long
_LEAST_SPARE_SECONDS = 0.5


class Hold:
    """Holds the sync that comes next until those have caught up who were too slow for it once.

    A state may take longer to arrive than the others take for a round. Then they commit meanwhile, and all of the state
    has changed when it has arrived. Who finds itself behind right after it has caught up says on its card how long that
    took: the download, and from there to the meeting. It downloads once more, from the commit of that meeting on; the
    others train on, but wait with their next sync until it is done. They come to it together, and soon after it: the
    stragglers' grace is for one another.

    Args:
        most_seconds: that anybody is waited for.
        say: where a line goes that a person should read.
    """

    def __init__(self, most_seconds: float, say: Callable[[str], None]) -> None:
        self._most_seconds, self._say = most_seconds, say
        self._behind: list[Card] = []  # of those who were behind again at the last meeting
        self._names = ""
        self._end = self._spare_seconds = 0.0

    def look(self, cards: dict[str, Card], leaders: list[str]) -> None:
        """Note who is behind again at a meeting."""
        names = [name for name, card in cards.items() if name not in leaders and card["download_seconds"] > 0]
        self._behind, self._names = [cards[name] for name in names], ", ".join(names)

    def begin(self) -> None:
        """The sync of that meeting has committed: from here on their download takes its time."""
        if self._behind:
            download_seconds = max(card["download_seconds"] for card in self._behind)
            adopt_seconds = max(card["adopt_seconds"] for card in self._behind)
            self._spare_seconds = _LEAST_SPARE_SECONDS + _SPARE * adopt_seconds
            self._end = time.monotonic() + min(_SPARE * download_seconds + self._spare_seconds, self._most_seconds)

    def wait(self, is_serving: Callable[[], bool], stop: Event) -> None:
        """Wait for them; not for one that has gone away.

        Args:
            is_serving: whether anybody is downloading from this worker.
            stop: ends it.
        """
        quiet_since = begin = time.monotonic()
        if begin < self._end:
            self._say(
                f"waiting up to {self._end - begin:.0f} s for {self._names}, whose link needs longer for the state "
                "than a round takes: raise outer.schedule.local_steps if workers join often"
            )
        while time.monotonic() < min(self._end, quiet_since + self._spare_seconds) and not stop.is_set():
            stop.wait(_POLL_SECONDS)
            quiet_since = time.monotonic() if is_serving() else quiet_since
        self._end = 0.0
