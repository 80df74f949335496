"""What the workers' diaries and metrics say of a run, and of every fault in it."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos.faults import Fault

_LOOK_SECONDS = 30.0  # at most so long after its begin is a stall a fault's
_SHARED = ("chain", "anchor", "samples", "frontier")  # what all workers have alike
BIN_STEPS = 500  # steps, over which losses are averaged


class BrokenPromise(Exception):
    """Something that must hold in every run did not."""


@dataclass(frozen=True)
class Cost:
    """What one fault did; seconds, None where it did not come about before the end of the run."""

    kind: str
    stall: float  # the survivors' longest time without a step
    trains: float | None  # from the fault's end until the victim has taken a step
    commits: float | None  # from the fault's end until a pseudo-gradient of the victim's is in a commit


class Diaries:
    """All that the workers of one run wrote.

    Args:
        folder: of the run.
        num_workers: of the run.
    """

    def __init__(self, folder: Path, num_workers: int) -> None:
        runs = [folder / f"worker-{worker}" for worker in range(num_workers)]
        self.steps = [np.fromfile(run / "diary" / "steps.bin", dtype="<f8") for run in runs]
        self.commits = [_lines(run / "diary" / "commits.jsonl") for run in runs]
        self.metrics = [_lines(run / "metrics" / f"worker-{worker}.jsonl") for worker, run in enumerate(runs)]

    def check(self) -> dict[str, int]:
        """Hold every version's states against each other; returns what was compared.

        A version may be reached once more, with another state, where all processes that had reached it were killed
        before: then it was lost, and the run went on from a checkpoint.

        Raises:
            BrokenPromise: two workers differ at a version, or the ledger went back.
        """
        states = defaultdict(list)
        for worker, commits in enumerate(self.commits):
            for commit in commits:
                states[commit["version"], commit["chain"]].append({"worker": worker, **commit})
        chains = defaultdict(list)  # of every version, in the order in which it was reached
        for (version, chain), commits in sorted(states.items(), key=lambda item: min(c["time"] for c in item[1])):
            if len({tuple(commit[key] for key in _SHARED) for commit in commits}) > 1:
                raise BrokenPromise(f"version {version} is not one: {commits}")
            chains[version].append(chain)
        for version, (*lost, last) in chains.items():
            again = min(commit["time"] for commit in states[version, last])
            for chain in lost:
                for commit in states[version, chain]:
                    if self._last_commit(commit["worker"], commit["pid"]) >= again:
                        raise BrokenPromise(f"version {version} is not one: {states[version, chain]}, {last}")
        for commits in self.commits:
            for before, after in pairwise(commits):
                if before["pid"] == after["pid"] and before["samples"] > after["samples"]:
                    raise BrokenPromise(f"committed samples became fewer: {before}, {after}")
        newest = states[max(chains), chains[max(chains)][-1]][0]
        compared = sum(len(commits) > 1 for commits in states.values())
        lost = sum(len(each) > 1 for each in chains.values())
        return {"versions": len(chains), "compared": compared, "lost": lost, "samples": newest["samples"]}

    def _last_commit(self, worker: int, pid: int) -> float:
        """Return when a process committed for the last time."""
        return max(commit["time"] for commit in self.commits[worker] if commit["pid"] == pid)

    def goodput(self, begin: float, end: float) -> float:
        """Committed samples a second between two moments."""
        inside = [c for commits in self.commits for c in commits if begin <= c["time"] <= end]
        first, last = min(inside, key=lambda c: c["time"]), max(inside, key=lambda c: c["time"])
        return float((last["samples"] - first["samples"]) / (last["time"] - first["time"]))

    def costs(self, faults: list[Fault], end: float) -> list[Cost]:
        """Of all faults; a worker counts as a survivor of one when it has recovered from its own."""
        costs: list[Cost] = []
        for index, fault in enumerate(faults):
            earlier = zip(faults, costs, strict=False)
            ill = {f.victim for f, cost in earlier if cost.commits is None or f.end + cost.commits > fault.begin}
            following = faults[index + 1].begin if index + 1 < len(faults) else end
            costs.append(self._cost(fault, following, ill | {fault.victim}))
        return costs

    def _cost(self, fault: Fault, following: float, ill: set[int]) -> Cost:
        until = min(following, fault.begin + _LOOK_SECONDS)
        others = [steps for worker, steps in enumerate(self.steps) if worker not in ill]
        trained = self.steps[fault.victim]
        trained = trained[trained > fault.end]
        numbers = [commit["contributed"] for commit in self.commits[fault.victim]]
        committed = [
            commit["time"]
            for commit, before in zip(self.commits[fault.victim][1:], numbers[:-1], strict=True)
            if commit["time"] > fault.end and commit["contributed"] > before
        ]
        return Cost(
            fault.kind,
            max((_longest_gap(steps, fault.begin, until) for steps in others), default=0.0),
            float(trained[0] - fault.end) if len(trained) else None,
            committed[0] - fault.end if committed else None,
        )

    def losses(self) -> dict[int, float]:
        """Training loss by steps of the whole run: means over all workers, a bin of steps each."""
        bins = defaultdict(list)
        for events in self.metrics:
            for event in events:
                if event["event"] == "step" and event["loss"] is not None:
                    bins[event["step"] // BIN_STEPS * BIN_STEPS].append(event["loss"])
        return {
            start: statistics.mean(losses) for start, losses in sorted(bins.items()) if len(losses) > BIN_STEPS // 20
        }

    def count(self) -> dict[str, int]:
        """Syncs and faults as the workers reported them."""
        events = [event for events in self.metrics for event in events]
        syncs = [event for event in events if event["event"] == "sync"]
        return {
            "refused": sum(not sync["committed"] for sync in syncs),
            "trained": sum(len(steps) for steps in self.steps),
        }


def usual_stall(diaries: Diaries, seconds: float) -> float:
    """The median of the longest times without a step, in windows of so many seconds without a fault."""
    begin, end = max(steps[0] for steps in diaries.steps), min(steps[-1] for steps in diaries.steps)
    starts = np.arange(begin, end - seconds, seconds)
    return statistics.median(max(_longest_gap(s, start, start + seconds) for s in diaries.steps) for start in starts)


def largest_rise(losses: dict[int, float]) -> float:
    """How far a run's loss ever rose above the lowest of the bins before."""
    values = list(losses.values())
    return max((value - min(values[:index]) for index, value in enumerate(values) if index), default=0.0)


def as_rows(costs: list[Cost]) -> list[list[Any]]:
    """A row per kind of fault, and one for all."""
    rows = []
    for kind in [*dict.fromkeys(cost.kind for cost in costs), "all"]:
        group = [cost for cost in costs if kind in (cost.kind, "all")]
        values = [
            [v for v in (asdict(cost)[name] for cost in group) if v is not None]
            for name in ("stall", "trains", "commits")
        ]
        cells = [f"{statistics.median(v):.1f} / {max(v):.1f}" if v else "-" for v in values]
        rows.append([kind, len(group), *cells])
    return rows


def _longest_gap(steps: np.ndarray, begin: float, end: float) -> float:
    inside = steps[(steps >= begin) & (steps <= end)]
    before = steps[steps < begin][-1:]
    return float(np.diff(np.concatenate([before, inside, [end]])).max())


def _lines(path: Path) -> list[dict[str, Any]]:
    whole, _, _ = path.read_text().rpartition("\n")  # whoever was killed may have written half a line
    return [json.loads(line) for line in whole.splitlines()]
