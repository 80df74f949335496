"""The metrics of a worker: one JSON object a line while it trains, and what adds up over the run.

Events of `metrics/worker-k.jsonl`, all counted for this worker alone:

    {"event": "step", "step", "tokens", "seconds", "loss", "grad_norm", "lr"}     tokens, seconds: since the beginning;
                                                             and what else the inner step tells ("generator_loss")
    {"event": "sync", "step", "outer_step", "fragment", "committed", "sent_bytes", "received_bytes", "seconds",
     "hidden_seconds", "num_peers", "norm", "cosine", "message_fraction", "reason"}       bytes, seconds: of this sync
    {"event": "eval", "step", "loss", "of": "anchor"}                             "model" where there is no anchor
    {"event": "fault", "step", "reason"}
    {"event": "rollback", "step", "number"}    all workers went back to their last good anchors, for the number-th time
    {"event": "restart", "step", "number", "reason"}    this worker died, for the number-th time, and was started again
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core import SyncReport

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # events, of some 200 bytes, that wait for room on the disk


class MetricsFile:
    """Appends events to a file that can be cut back to an earlier size.

    The file holds whole lines at any time; what comes behind its first `kept_bytes` is cut off when it is opened. On a
    full disk events wait in memory, and follow as soon as there is room. `listen` is told every event, too.
    """

    def __init__(
        self, path: Path, kept_bytes: int = 0, listen: Callable[[str, dict[str, Any]], None] | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(kept_bytes)
        self._size_bytes, self._listen = kept_bytes, listen
        self._waiting = deque[bytes](maxlen=_MOST_WAITING)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        self._write_out()
        return self._size_bytes

    def write(self, event: str, **values: Any) -> None:
        """Add one event; numbers that are not finite become null."""
        line = {"event": event} | {name: _finite(value) for name, value in values.items()}
        self._waiting.append(json.dumps(line, allow_nan=False).encode() + b"\n")
        problem = self._write_out()
        if problem and len(self._waiting) == 1:
            _LOGGER.warning(
                "%s cannot be written (%s): make room there; events wait in memory", self._file.name, problem
            )
        if self._listen:
            self._listen(event, values)

    def close(self) -> None:
        """Close the file; events that still wait are lost."""
        self._write_out()
        self._file.close()

    def _write_out(self) -> str:
        """Write what waits; return why that cannot be, or an empty string."""
        problem = ""
        while self._waiting and not problem:
            line = self._waiting[0]
            try:
                problem = "" if self._file.write(line) == len(line) else "only in part"
            except OSError as error:
                problem = error.strerror or str(error)
            if problem:
                self._file.truncate(self._size_bytes)
            else:
                self._size_bytes += len(self._waiting.popleft())
        return problem


def whole_lines(path: Path) -> int:
    """Return the size of a file up to the end of its last whole line; 0 where there is none."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


@dataclass
class Totals:
    """The sums over a run, on one worker."""

    steps: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    num_syncs: int = 0
    refused_syncs: int = 0
    num_rollbacks: int = 0  # of the run
    sent_bytes: int = 0
    received_bytes: int = 0
    train_seconds: float = 0.0  # inner and outer steps, without evaluation and checkpoints
    sync_seconds: float = 0.0  # quorum to commit, hidden or not
    hidden_seconds: float = 0.0  # the part of it during which training went on

    @property
    def compute_seconds(self) -> float:
        """The seconds of training without those of waiting."""
        return self.train_seconds - (self.sync_seconds - self.hidden_seconds)

    def count_step(self, tokens: int, seconds: float, skipped: bool) -> None:
        """Count one inner step, with the outer loop's part of it."""
        self.steps += 1
        self.tokens += tokens
        self.train_seconds += seconds
        self.skipped_steps += skipped

    def add(self, report: SyncReport) -> None:
        """Count one sync."""
        self.num_syncs += 1
        self.refused_syncs += not report.committed
        self.sent_bytes += report.sent_bytes
        self.received_bytes += report.received_bytes
        self.sync_seconds += report.seconds
        self.hidden_seconds += report.hidden_seconds


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
