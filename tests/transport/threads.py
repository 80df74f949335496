"""Calls that wait for one another, each on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
