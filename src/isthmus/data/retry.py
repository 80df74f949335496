"""Which errors may pass by themselves, and how long to wait for that."""

from __future__ import annotations

import zlib

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a source is asked again

_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, EOFError, zlib.error)
_NETWORK_LIBRARIES = frozenset(
    {"aiohttp", "httpx", "httpcore", "httpx2", "httpcore2", "requests", "urllib3", "botocore"}
)


def is_passing(error: BaseException) -> bool:
    """Whether the same question may have an answer a little later: faults of the network, not of the data."""
    if isinstance(error, _FOR_GOOD):
        return False
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES:
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    text = str(error).strip()
    return text.split("\n", 1)[0] if text else type(error).__name__
