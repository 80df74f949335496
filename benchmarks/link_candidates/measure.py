"""What is measured of a candidate."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.link_candidates.pair import Candidate, Pair

LARGE, SMALL, LOOPBACK, ABORTED = 30_000_000, 300_000, 64_000_000, 200_000_000
PAUSE_SECONDS = 5.0
ABORT_CONNECTIONS = 4


def on_loopback(candidate: Candidate, connections: list[int], repeats: int) -> dict[str, Any]:
    """MB that one peer sends and as many that it receives, a second of its processor."""
    found: dict[str, Any] = {}
    with Pair(candidate, inside=False) as pair:
        for num in connections:
            pair.connect(num)
            pair.exchange(num, LOOPBACK, check=True)
            seconds, used = pair.exchange(num, LOOPBACK, repeats=repeats)
            moved = 1e-6 * LOOPBACK * repeats
            found[str(num)] = {"mb_per_core_second": 2 * moved / used, "mb_per_second": moved / seconds}
    return found


def between_hosts(candidate: Candidate, connections: list[int], repeats: int, whole: bool) -> dict[str, Any]:
    """Seconds of large and small messages by number of connections; if `whole`, after a pause and of an abort too."""
    found: dict[str, Any] = {}
    with Pair(candidate, inside=True) as pair:
        found["congestion"] = pair.both("congestion")[0]
        for num in connections:
            pair.connect(num)
            for check in (True, False):
                pair.exchange(num, LARGE, check=check)
            large = [pair.exchange(num, LARGE)[0] for _ in range(repeats)]
            small = [pair.exchange(num, SMALL)[0] for _ in range(repeats + 1)][1:]
            found[str(num)] = {"large": large, "small": small}
        if whole:
            _after_pause(pair, connections, found)
            found["abort"] = pair.abort(ABORT_CONNECTIONS, ABORTED)
    return found


def _after_pause(pair: Pair, connections: list[int], found: dict[str, Any]) -> None:
    """Have all links rest for as long, each while the others work or rest."""
    ended: dict[int, float] = {}
    for num in connections:
        pair.exchange(num, LARGE)
        ended[num] = time.monotonic()
    for num in connections:
        time.sleep(max(0, ended[num] + PAUSE_SECONDS - time.monotonic()))
        found[str(num)]["after_pause"] = pair.exchange(num, LARGE)[0]


def median(values: list[float]) -> float:
    """Of the repeats."""
    return statistics.median(values)
