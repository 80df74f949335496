"""One handler on the logger `isthmus` writes all log lines; the command line sets it up in every process alike.

Modules write to `logging.getLogger(__name__)`. Without the command line, as with `attach` in a training loop of your
own, nothing is set up here: the lines go wherever your program sends them.
"""

import logging
import sys
from contextlib import suppress

from typing_extensions import override

_LOGGER = logging.getLogger("isthmus")
_OPTIONS = {logging.DEBUG: ["--verbose"], logging.WARNING: ["--quiet"]}  # of the command line


class PlainLines(logging.Handler):
    """Writes plain lines to standard error at once. A disk that is full loses lines and ends nothing."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(self.format(record), file=sys.stderr, flush=True)

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if record.levelno >= logging.ERROR:
            return f"error: {line}"
        return line if record.levelno >= logging.INFO else f"{record.name}: {line}"


def set_up(verbose: bool = False, quiet: bool = False) -> None:
    """Have this process write its log lines to standard error: details only if `verbose`, warnings only if `quiet`."""
    if not any(isinstance(handler, PlainLines) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(PlainLines())
    _LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def options() -> list[str]:
    """Return the options with which another `isthmus` process writes as much as this one."""
    return _OPTIONS.get(_LOGGER.level, [])
