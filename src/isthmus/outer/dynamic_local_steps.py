"""How many steps of the schedule one inner step stands for, so that unequal workers reach a sync together."""

from fractions import Fraction

_LONGEST_STEP = 4.0  # times the mean; a worker that is slower from now on is known within a round or two


class DynamicLocalSteps:
    """Counts steps of the schedule: one for an inner step on the fastest worker, more on slower ones.

    Over H steps of the schedule a worker of relative speed s takes round(s H) inner steps, at least one (dynamic
    local updates, arXiv 2401.09135). Times come from the transport's clock. The speed is the mean over the last H inner
    steps or so, older ones counting less and less: steps on a shared processor take now one, now three times as long,
    and a mean over few of them, or of their inverses, would be off. A pause of seconds (the process was stopped, its
    machine was busy) counts as one long step: else the worker would take few steps for many rounds afterwards.
    """

    def __init__(self, local_steps: int) -> None:
        self._decay = 1 - 1 / (local_steps + 1)  # weight of earlier steps after one more
        self._steps = self._seconds = 0.0
        self._per_inner_step = Fraction(1)
        self._due = Fraction(0)
        self._started: float | None = None

    @property
    def steps_per_second(self) -> float:
        """Inner steps a second while this worker trains; 0 while that is not known yet."""
        return self._steps / self._seconds if self._seconds else 0.0

    def start_step(self, now: float) -> None:
        """Note that the next inner step begins."""
        self._started = now

    def end_step(self, now: float) -> int:
        """Count one inner step; returns how many steps of the schedule are due."""
        if self._started is not None and now > self._started:
            seconds = now - self._started
            if self._steps:
                seconds = min(seconds, _LONGEST_STEP * self._seconds / self._steps)
            self._steps = self._decay * self._steps + 1
            self._seconds = self._decay * self._seconds + seconds
        self._due += self._per_inner_step
        due = int(self._due)
        self._due -= due
        return due

    def adapt(self, relative_speed: float, local_steps: int) -> None:
        """Go on at this share of the fastest worker's speed, in (0, 1], in rounds of `local_steps` (H)."""
        own_steps = max(1, round(relative_speed * local_steps))
        self._per_inner_step = Fraction(local_steps, own_steps)
