"""What a file that still grows tells: a line of JSON an event."""

import json
from pathlib import Path
from typing import Any


def read_events(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a file, of one kind or of all: its whole lines, as the last may be half written."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    events = map(json.loads, whole.splitlines())
    return [event for event in events if kind in (None, event.get("event"))]
