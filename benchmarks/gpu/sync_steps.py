"""What a sync costs the steps of training: the one that begins it, those beside it, the one that finishes it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import subject
from benchmarks.gpu.figures import Figure
from isthmus.compress.base import Codec
from isthmus.compress.float4 import Float4
from isthmus.core import SyncSchedule, split_whole
from isthmus.inner.supervised import SupervisedStep
from isthmus.outer import KeepProgress, Offload, OuterLoop
from isthmus.transport.local import Local, LocalWorld

FINISH_MS, BEGIN_MS, BESIDE_PERCENT = {None: 8.0, "cpu": 20.0}, 3.0, 0.5


@dataclass(frozen=True)
class Far:
    """A codec over a slow link: the communication thread waits, as it would for the others' messages."""

    codec: Codec
    link_seconds: float

    replicated = True

    def message_fraction(self, state: Any) -> float:
        """Return 1, as every message has all of its size."""
        return 1.0

    def average(self, local: Any, state: Any, peers: Any, with_residual: bool = True) -> Any:
        """Return what the codec does, later."""
        time.sleep(self.link_seconds)
        return self.codec.average(local, state, peers, with_residual)


def measure(folder: Path, offload: str | None) -> Iterator[Figure]:
    """Yield what is added to a quiet step (inner and outer); `offload` is where outer state stays between syncs."""
    kinds = step_seconds(Offload(offload))
    medians = {kind: 1e3 * statistics.median(taken) for kind, taken in kinds.items()}
    quiet = medians["quiet"]
    yield Figure("a quiet step", quiet, " ms", details=kinds)
    yield Figure("the step that finishes a sync, above that", medians["finish"] - quiet, " ms", FINISH_MS[offload])
    yield Figure("the step that begins one, above that", medians["begin"] - quiet, " ms", BEGIN_MS)
    yield Figure("a step beside one, above that", 100 * (medians["beside"] / quiet - 1), " %", BESIDE_PERCENT)
    busy = [once for kind, taken in kinds.items() if kind != "quiet" for once in taken]
    whole = statistics.mean(busy) / statistics.mean(kinds["quiet"]) - 1
    yield Figure("all from the step before a sync to the one after, in the mean above that", 100 * whole, " %")


def step_seconds(offload: Offload) -> dict[str, list[float]]:
    """Return the seconds of steps, by what a sync does in them; offloaded state comes before it and leaves after it."""
    model, batch, T = subject.build_model(), subject.batch(), subject.IN_FLIGHT_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inner_step = SupervisedStep(model, optimizer, precision=subject.PRECISION)
    warm = [subject.seconds(partial(inner_step, batch)) for _ in range(3)]
    loop = OuterLoop(
        split_whole(model),
        SyncSchedule(2 * T, overlap_steps=T),
        Far(Float4("E3M0"), link_seconds=T / 2 * warm[-1]),
        Local(LocalWorld(1), 0),
        partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        KeepProgress(),
        hash_every=0,
        offload=offload,
    )
    kinds: dict[str, list[float]] = {kind: [] for kind in ("quiet", "before", "begin", "beside", "finish", "after")}
    special = {0: "begin", T: "finish", T + 1: "after", 2 * T - 1: "before"}

    def step() -> None:
        inner_step(batch)
        loop.step()

    for number in range(1, 2 * T * (subject.SYNCS + 2) + 1):
        once = subject.seconds(step)
        if number >= 4 * T:  # the first sync warms up
            phase = number % (2 * T)
            kinds[special.get(phase, "beside" if phase < T else "quiet")].append(once)
    loop.close()
    return kinds
