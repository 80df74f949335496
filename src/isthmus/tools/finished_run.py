"""A finished run, read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from isthmus.core import SyncSchedule, UserError


@dataclass(frozen=True)
class FinishedRun:
    """What a run left in its folder."""

    name: str
    config: dict[str, Any]  # config.yaml
    summary: dict[str, Any]  # summary.json
    events: list[dict[str, Any]]  # metrics of worker 0, which also evaluates

    @classmethod
    def read(cls, run_dir: Path, name: str | None = None) -> FinishedRun:
        """Read the folder of a run, which is called after its recipe where no name is given.

        Raises:
            UserError: a file is missing or damaged.
        """
        try:
            config = yaml.safe_load((run_dir / "config.yaml").read_text())
            summary = json.loads((run_dir / "summary.json").read_text())
            lines = (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines()
            events = [json.loads(line) for line in lines]
        except OSError as error:
            raise UserError(f"{run_dir} does not hold a finished run: cannot read {error.filename}") from None
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"{run_dir} holds a damaged file: {' '.join(str(error).split())}") from None
        return cls(name or summary["recipe"], config, summary, events)

    @property
    def steps(self) -> int:
        """The number of inner steps of the run."""
        return int(self.summary["steps"])

    @property
    def step_seconds(self) -> float:
        """The measured seconds of computing per inner step, as a mean over the workers."""
        return float(mean(self.summary["compute_seconds"])) / self.steps

    @property
    def sent_bytes(self) -> float:
        """The bytes sent, as a mean over the workers."""
        return float(mean(self.summary["sent_bytes"]))

    @property
    def schedule(self) -> SyncSchedule | None:
        """The schedule of the syncs; None where gradients were averaged at every step."""
        fields = self.config["outer"].get("schedule")
        return SyncSchedule(**fields) if fields else None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        """Return the evaluation loss after each step that was evaluated, where it is finite."""
        return {event["step"]: event["loss"] for event in self.of("eval") if event["loss"] is not None}

    def sent_until(self) -> list[int]:
        """Return the bytes that worker 0 had sent after each inner step (first entry: 0)."""
        sent = [0] * (self.steps + 1)
        for event in self.of("sync"):
            sent[event["step"]] += event["sent_bytes"]
        for step in range(1, len(sent)):
            sent[step] += sent[step - 1]
        return sent
