"""How fast this worker goes through the schedule, so that workers of different speed reach a sync together."""

from __future__ import annotations

from fractions import Fraction


class Pace:
    """Steps of the schedule that one inner step of this worker stands for: 1 on the fastest, more on slower ones.

    Over H steps of the schedule a worker of relative speed s takes round(s H) inner steps, at least one (dynamic
    local updates, arXiv 2401.09135). Times come from the transport's clock. The speed is the mean over the last H inner
    steps or so, older ones counting less and less: steps on a shared processor take now one, now three times as long,
    and a mean over few of them, or of their inverses, would be off.

    Args:
        local_steps: H.
    """

    def __init__(self, local_steps: int) -> None:
        self.local_steps = local_steps
        self._keep = 1 - 1 / (local_steps + 1)  # what earlier steps count for after one more
        self._steps = self._seconds = 0.0
        self._per_step = Fraction(1)
        self._due = Fraction(0)
        self._resumed: float | None = None

    @property
    def steps_per_second(self) -> float:
        """Of this worker, while it trains; 0: not known yet."""
        return self._steps / self._seconds if self._seconds else 0.0

    def step(self, now: float) -> int:
        """Count one inner step, which ended at `now`; returns how many steps of the schedule are due."""
        if self._resumed is not None and now > self._resumed:
            self._steps = self._keep * self._steps + 1
            self._seconds = self._keep * self._seconds + now - self._resumed
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
