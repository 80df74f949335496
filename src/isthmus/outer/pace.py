"""How fast this worker goes through the schedule, so that workers of different speed reach a sync together."""

from __future__ import annotations

from fractions import Fraction


class Pace:
    """Steps of the schedule that one inner step of this worker stands for: 1 on the fastest, more on slower ones.

    Over H steps of the schedule a worker of relative speed s takes round(s H) inner steps, at least one (dynamic
    local updates, arXiv 2401.09135). Times come from the transport's clock.

    Args:
        local_steps: H.
    """

    def __init__(self, local_steps: int) -> None:
        self.local_steps = local_steps
        self.steps_per_second = 0.0  # of this worker, while it trains; 0: not known yet
        self._per_step = Fraction(1)
        self._due = Fraction(0)
        self._resumed: float | None = None

    def step(self, now: float) -> int:
        """Count one inner step, which ended at `now`; returns how many steps of the schedule are due."""
        if self._resumed is not None and now > self._resumed:
            rate = 1 / (now - self._resumed)
            self.steps_per_second = rate if not self.steps_per_second else 0.9 * self.steps_per_second + 0.1 * rate
        self._due += self._per_step
        due = int(self._due)
        self._due -= due
        return due

    def resume(self, now: float) -> None:
        """The next inner step begins."""
        self._resumed = now

    def adopt(self, relative_speed: float) -> None:
        """Go on at this share of the fastest worker's speed, in (0, 1]."""
        own_steps = max(1, round(relative_speed * self.local_steps))
        self._per_step = Fraction(self.local_steps, own_steps)
