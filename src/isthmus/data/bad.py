"""Samples that cannot be read: named, counted, passed over up to a limit."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from isthmus.core.types import UserError


class ErrorBudget:
    """What one process could not read. May be used by several threads.

    Args:
        limit: samples that are passed over; one more ends the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        """Whether a sample is known to be bad."""
        return name in self._names

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)

    def add(self, name: str, error: Exception) -> None:
        """Say once that a sample is bad, and why.

        Raises:
            UserError: it is one too many.
        """
        with self._lock:
            if name in self._names:
                return
            self._names.add(name)
            said = error.strerror if isinstance(error, OSError) else None
            reason = said or " ".join(str(error).split()) or type(error).__name__
            if len(self) > self._limit:
                raise UserError(
                    f"data: {name!r} cannot be read ({reason}), the bad sample number {len(self)}: "
                    "mend the data, or raise max_bad_samples"
                )
            with suppress(OSError):  # the log's disk is full
                line = f"data: {name!r} cannot be read ({reason}): passed over, {len(self)} of at most {self._limit}"
                print(line, file=sys.stderr, flush=True)
