"""Learning-rate schedules: pure functions of the progress of the whole run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from typing_extensions import override

from isthmus.core.types import UserError


@dataclass(frozen=True)
class LRSchedule:
    """A linear warm-up, then a shape; every learning rate is multiplied by the factor this gives.

    It holds no counter: workers that agree on the step of the run agree on the factor. Fractions, not steps,
    so that a schedule fits a run of any length.
    """

    warmup_fraction: float = 0.05  # of the run

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise UserError(f"learning-rate schedule: {field.name} is {value}; choose a fraction from 0 to 1")

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor of step `step` (counted from 0) of `total_steps`; it is constant after the end."""
        warmup_steps = round(self.warmup_fraction * total_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return self.shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    def shape(self, done: float) -> float:
        """Return the factor when a fraction `done` of the steps after the warm-up is done."""
        raise NotImplementedError

    def over(self, total_steps: int) -> Callable[[int], float]:
        """Return this schedule for a run of `total_steps`, as a function from the step to the factor."""
        return partial(self.factor, total_steps=total_steps)


@dataclass(frozen=True)
class Constant(LRSchedule):
    """The full learning rate after the warm-up."""

    @override
    def shape(self, done: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(LRSchedule):
    """Half a cosine from 1 down to `final_fraction` (arXiv 1608.03983, equation 5, without restarts)."""

    final_fraction: float = 0.1  # of the peak

    @override
    def shape(self, done: float) -> float:
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class WSD(LRSchedule):
    """Warm-up, stable, decay: constant, then a line down to `final_fraction` (arXiv 2404.06395, section 4)."""

    decay_fraction: float = 0.2  # of the steps after the warm-up
    final_fraction: float = 0.0  # of the peak

    @override
    def shape(self, done: float) -> float:
        left = 1 - done
        if left >= self.decay_fraction:
            return 1.0
        return self.final_fraction + (1 - self.final_fraction) * left / self.decay_fraction
