"""Live progress of a run, from the metrics files that its workers write."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from isthmus.tools.report import readable_bytes
from isthmus.train.run_folder import metrics_path

_PLAIN_SECONDS = 5.0  # between two plain lines


class MetricsReader:
    """Reads one worker's metrics file as it grows, and keeps the newest figures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._position = self.step = self.num_syncs = self.sent_bytes = 0
        self._last_line = b""  # which ends at the position
        self.tokens = self.train_seconds = self.sync_seconds = self.hidden_seconds = 0.0
        self.loss: float | None = None
        self.eval_loss: float | None = None

    def read(self) -> list[str]:
        """Read the lines that have come since the last time; return the reasons of faults among them."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position - len(self._last_line))
            new = file.read()
            if not new.startswith(self._last_line):  # a resumed run has cut the file, and may have gone on with it
                self._forget()
                file.seek(0)
                new = file.read()
        lines = new[len(self._last_line) : new.rfind(b"\n") + 1].splitlines(keepends=True)
        if lines:
            self._position += sum(map(len, lines))
            self._last_line = lines[-1]
        events = [json.loads(line) for line in lines]
        return [fault for event in events if (fault := self._take(event))]

    def _take(self, event: dict[str, Any]) -> str:
        match event["event"]:
            case "step":
                self.step, self.loss = event["step"], event["loss"]
                self.tokens, self.train_seconds = event["tokens"], event["seconds"]
            case "sync":
                self.num_syncs += 1
                self.sent_bytes += event["sent_bytes"]
                self.sync_seconds += event["seconds"]
                self.hidden_seconds += event["hidden_seconds"]
            case "eval":
                self.eval_loss = event["loss"]
            case "fault":
                return f"step {event['step']}: {event['reason']}"
        return ""


class LiveProgress:
    """A bar on a terminal, a line every few seconds elsewhere. Figures are worker 0's, tokens/s those of all."""

    def __init__(self, run_dir: Path, name: str, workers: int, steps: int, console: Console) -> None:
        self.name, self.steps, self.console = name, steps, console
        self._readers = [MetricsReader(metrics_path(run_dir, worker)) for worker in range(workers)]
        self._printed, self._printed_at = "", time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f}  {task.fields[figures]}", table_column=Column(no_wrap=False)
            ),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=steps, figures="starting")

    def __enter__(self) -> Self:
        """Begin to show."""
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Show the last figures and leave them there."""
        self.update(last=True)
        self._bar.stop()

    def update(self, last: bool = False) -> None:
        """Read what is new, and show it."""
        for worker, reader in enumerate(self._readers):
            for fault in reader.read():
                self.console.print(f"{self.name}: worker {worker}, {fault}", soft_wrap=True)
        figures, step = self.figures(), self._readers[0].step
        self._bar.update(self._task, completed=step, figures=figures)
        due = last or time.monotonic() - self._printed_at >= _PLAIN_SECONDS
        line = f"{self.name}  step {step}/{self.steps}  {figures}"
        if not self.console.is_terminal and due and line != self._printed:
            self.console.print(line, soft_wrap=True)
            self._printed, self._printed_at = line, time.monotonic()

    def figures(self) -> str:
        """Return loss, speed and traffic so far in one line."""
        first = self._readers[0]
        if first.loss is None:
            return "starting"
        rate = sum(reader.tokens / reader.train_seconds for reader in self._readers if reader.train_seconds)
        parts = [f"loss {first.loss:.3f}"]
        if first.eval_loss is not None:
            parts.append(f"eval {first.eval_loss:.3f}")
        parts.append(f"{rate:,.0f} tokens/s")
        if first.num_syncs:
            hidden = first.hidden_seconds / first.sync_seconds if first.sync_seconds else 0.0
            parts += [f"{first.num_syncs} syncs", f"{readable_bytes(first.sent_bytes)} sent", f"{hidden:.0%} hidden"]
        return "  ".join(parts)
