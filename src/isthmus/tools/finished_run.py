"""A finished run, read back from its folder, and what it would have taken on slower links.

That is modelled from what was measured, and always called so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from isthmus.config import parse
from isthmus.core import SyncSchedule, UserError
from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.tools.sync_traffic import SyncTraffic, Uplink, sync_traffic


@dataclass(frozen=True)
class FinishedRun:
    """The files that a run left in its folder, read."""

    name: str
    config: dict[str, Any]  # config.yaml
    summary: dict[str, Any]  # summary.json
    events: list[dict[str, Any]]  # metrics of worker 0, which also evaluates

    @classmethod
    def read(cls, run_dir: Path, name: str | None = None) -> FinishedRun:
        """Read the folder of a run, which is called after its recipe where no name is given.

        A `UserError` names the file that is missing or damaged.
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


def modelled_clock(
    run: FinishedRun, megabits_per_second: float, step_seconds: float | None = None, round_trip_ms: float = 0.0
) -> list[float]:
    """Return the seconds after each inner step (first entry: the start) if every worker had an uplink like this.

    A step computes for `step_seconds`. A sync takes 8 * sent_bytes / bandwidth, and as long as its collectives are on
    their way; there is one at a time. It begins when it was sent, and training waits for its end where the sync was
    finished, `overlap_steps` later: what these steps of computing cannot hide is exposed.

    Not modelled: downlinks, and what `ddp` hides of its all-reduce behind its own backward pass (all of it counts as
    exposed). Without `step_seconds` a step takes as long as was measured in this run.
    """
    uplink = Uplink(megabits_per_second, round_trip_ms)
    num_trips = max(each.num_trips for each in sync_traffic(parse(run.config)).values()) if round_trip_ms else 0
    compute = run.step_seconds if step_seconds is None else step_seconds
    sent_after = _steps_of_sending(run)
    finished = defaultdict(list)
    for event in run.of("sync"):
        finished[event["step"]].append(event)
    clock, link_free = [0.0], 0.0
    for step in range(1, run.steps + 1):
        now = clock[-1] + compute
        for event in finished[step]:
            sent = sent_after.get(event["outer_step"], step)
            link_free = max(link_free, clock[sent] if sent < step else now)
            link_free += uplink.seconds(SyncTraffic(event["sent_bytes"], num_trips))
            now = max(now, link_free)
        clock.append(now)
    return clock


def modelled_utilisation(
    run: FinishedRun, megabits_per_second: float, step_seconds: float | None = None, round_trip_ms: float = 0.0
) -> float:
    """Return the share of the modelled time in which a worker computes; where it is 1 communication is free."""
    compute = run.step_seconds if step_seconds is None else step_seconds
    return run.steps * compute / modelled_clock(run, megabits_per_second, step_seconds, round_trip_ms)[-1]


def _steps_of_sending(run: FinishedRun) -> dict[int, int]:
    """Return the inner step after which each sync was sent, by its number, for those that the schedule sends."""
    if run.schedule is None:
        return {}
    schedule, sends = AdaptiveSchedule(run.schedule), list[int]()
    message_fractions = {
        event["step"]: event.get("message_fraction", event.get("effort", 1.0))
        for event in run.of("sync")
        if event["committed"]
    }
    for step in range(1, run.steps + 1):
        schedule.message_fraction = message_fractions.get(step, schedule.message_fraction)
        sends += [step] * len(schedule.begins(step))
        schedule.adapt(step)
    return dict(enumerate(sends))
