"""The figures of a worker: gauges as of the last event, counters since the run began."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.train.metrics import Totals

GAUGES = {
    "alive": "1 while the worker runs",
    "participating": "1 where the last sync was committed",
    "peers": "workers in the last sync, this one included",
    "outer_version": "the outer step that the last committed sync made, counted over all fragments",
    "step": "steps of the whole run that are done",
    "planned_steps": "steps of the whole run",
    "loss": "training loss",
    "learning_rate": "of the inner optimizer",
    "gradient_norm": "before it is clipped",
    "pseudo_gradient_norm": "of the mean of the last committed sync",
    "pseudo_gradient_cosine": "between the mean of the last committed sync and this worker's own pseudo-gradient",
    "hidden_share": "share of the time of all syncs during which training went on",
    "last_event_timestamp_seconds": "when the worker last said anything",
}
COUNTERS = {
    "inner_steps": "inner steps that this worker took",
    "skipped_steps": "of these, without a finite gradient",
    "tokens": "that this worker trained on",
    "train_seconds": "of inner and outer steps, waiting included",
    "syncs": "finished",
    "committed_syncs": "of these, committed",
    "sent_bytes": "by this worker to others",
    "received_bytes": "by this worker from others",
    "sync_seconds": "from quorum to commit, hidden or not",
    "hidden_seconds": "of these, while training went on",
    "faults": "since the process began",
}


class Figures:
    """The figures of one worker.

    Args:
        planned_steps: of the whole run.

    Attributes:
        evaluation: what the last one found, by name; only worker 0 evaluates.
    """

    def __init__(self, planned_steps: int) -> None:
        self.evaluation = dict[str, float]()
        self._totals = Totals()
        self._faults = 0
        self._gauges: dict[str, float] = {"participating": 0, "outer_version": 0, "step": 0}
        self._gauges |= {"planned_steps": planned_steps, "last_event_timestamp_seconds": time.time()}

    def begin(self, step: int, totals: Totals) -> None:
        """Begin with a run that goes on after `step`."""
        self._totals = totals
        self._gauges["step"] = step

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Take in one event of `isthmus.train.metrics`."""
        new: dict[str, float] = {"step": values["step"], "last_event_timestamp_seconds": time.time()}
        match event:
            case "step":
                names = {"loss": "loss", "lr": "learning_rate", "grad_norm": "gradient_norm"}
                new |= {names[name]: values[name] for name in names}
            case "sync":
                new |= {"participating": float(values["committed"]), "peers": values["num_peers"]}
                if values["committed"]:
                    new |= {f"pseudo_gradient_{name}": values[name] for name in ("norm", "cosine")}
                    new["outer_version"] = max(self._gauges["outer_version"], values["outer_step"] + 1)
            case "eval":
                self.evaluation = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
            case "fault":
                self._faults += 1
        self._gauges = self._gauges | new  # at once: another thread may read it

    def gauges(self) -> dict[str, float]:
        """Return those of `GAUGES` that are known."""
        totals = self._totals
        share = totals.hidden_seconds / totals.sync_seconds if totals.sync_seconds else 0.0
        return {**self._gauges, "alive": 1, "hidden_share": share}

    def counters(self) -> dict[str, float]:
        """Return all of `COUNTERS`."""
        totals = replace(self._totals)  # it grows meanwhile
        return {
            "inner_steps": totals.steps,
            "syncs": totals.num_syncs,
            "committed_syncs": totals.num_syncs - totals.refused_syncs,
            "faults": self._faults,
        } | {
            name: getattr(totals, name)
            for name in COUNTERS
            if name not in ("inner_steps", "syncs", "committed_syncs", "faults")
        }

    def health(self) -> dict[str, Any]:
        """Return whether and how the worker trains, in a few figures."""
        gauges, counters = self.gauges(), self.counters()
        return {
            "alive": True,
            "participating": bool(gauges["participating"]),
            "step": gauges["step"],
            "planned_steps": gauges["planned_steps"],
            "committed_syncs": counters["committed_syncs"],
            "outer_version": gauges["outer_version"],
            "seconds_since_last_event": round(time.time() - gauges["last_event_timestamp_seconds"], 3),
        }
