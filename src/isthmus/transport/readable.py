"""The messages of other libraries' errors, for people to read."""

from __future__ import annotations

import re


def readable_message(error: Exception) -> str:
    """Return what people can read of a message of torch or gloo: no source path, no advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).split("\n")[0]).split(". ")[0]
