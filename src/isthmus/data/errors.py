"""Samples that cannot be read, which are passed over up to a limit, and errors that pass by themselves."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.core.types import UserError

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a source is asked again
TO_UTF_8 = "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8 OLD > NEW, or whatever its encoding is)"

_log = logging.getLogger(__name__)
_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, EOFError, zlib.error)
_NETWORK_LIBRARIES = frozenset(
    {"aiohttp", "httpx", "httpcore", "httpx2", "httpcore2", "requests", "urllib3", "botocore"}
)


class ErrorBudget:
    """The samples that one process could not read, `limit` at most; one more ends the run. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def add(self, name: str, error: Exception) -> None:
        """Log once that a sample is bad, and why.

        Raises:
            UserError: it is one too many.
        """
        with self._lock:
            if name in self._names:
                return
            self._names.add(name)
            count, reason = len(self._names), _reason(error)
            if count > self._limit:
                raise UserError(
                    f"data: {name!r} cannot be read ({reason}), the bad sample number {count}: "
                    "mend the data, or raise max_bad_samples"
                )
            _log.warning(
                "data: %r cannot be read (%s): it is passed over, %d of at most %d", name, reason, count, self._limit
            )


@contextmanager
def named_files() -> Iterator[None]:
    """Say in one line which file cannot be read, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"data: cannot read {error.filename!r}: {error.strerror}") from error


def is_passing(error: BaseException) -> bool:
    """Tell whether the same question may have an answer a little later: faults of the network, not of the data."""
    if isinstance(error, _FOR_GOOD):
        return False
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES:
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: {TO_UTF_8}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__
