"""The schedule of syncs: which fragment begins or finishes its sync after which inner step."""

import math
from dataclasses import dataclass

from isthmus.core.types import UserError


@dataclass(frozen=True)
class SyncSchedule:
    """A periodic schedule of syncs (Streaming DiLoCo, arXiv 2501.18512, algorithm 2).

    Every fragment is sent once in `local_steps` inner steps (H); the `num_fragments` (P) sends are spread
    H/P apart, the last one at H; a sync may take `overlap_steps` (tau) inner steps. tau = 0 blocks, tau = H is
    a delay of one whole round (Eager Updates, DiLoCoX).

    `warm_start_steps` inner steps come before all this: there every fragment is synced after every
    `warm_start_every`-th step and after the last, blocking, and the anchor takes a step of plain SGD with learning rate
    `warm_start_lr`; with 1 it becomes the mean of the workers.
    """

    local_steps: int
    num_fragments: int = 1
    overlap_steps: int = 0
    warm_start_steps: int = 0
    warm_start_every: int = 1
    warm_start_lr: float = 1.0

    def __post_init__(self) -> None:
        H, P, tau = self.local_steps, self.num_fragments, self.overlap_steps
        if H < 1 or P < 1 or tau < 0 or self.warm_start_steps < 0 or self.warm_start_every < 1:
            raise UserError(
                "schedule: local_steps, num_fragments and warm_start_every must be at least 1, overlap_steps and "
                "warm_start_steps at least 0"
            )
        if not 0 < self.warm_start_lr < math.inf:
            raise UserError(f"schedule: warm_start_lr is {self.warm_start_lr}; choose a positive number, such as 1")
        if H % P:
            raise UserError(f"schedule: local_steps {H} is not divisible by num_fragments {P}: choose a multiple")
        if tau > H:
            raise UserError(f"schedule: overlap_steps {tau} is more than local_steps {H}; choose at most {H}")

    def warm(self, step: int) -> bool:
        """Whether inner step `step` (counted from 1) belongs to the synchronous warm start."""
        return step <= self.warm_start_steps

    def begins(self, step: int) -> list[int]:
        """Return the fragments captured and sent after inner step `step`, in the order of sending."""
        if self.warm(step):
            due = step % self.warm_start_every == 0 or step == self.warm_start_steps
            return list(range(self.num_fragments)) if due else []
        phase = (step - self.warm_start_steps) % self.local_steps
        interval = self.local_steps // self.num_fragments
        return [] if phase % interval else [(phase // interval - 1) % self.num_fragments]

    def finishes(self, step: int) -> list[int]:
        """Return the fragments whose sync is due after inner step `step`.

        With a full delay (tau = H) an empty sync is finished at the first boundary, although nothing was sent before.
        """
        if self.warm(step) or self.overlap_steps == self.local_steps:
            return self.begins(step)
        sent = step - self.overlap_steps
        return [] if self.warm(sent) else self.begins(sent)

    def blocking(self, step: int) -> bool:
        """Whether what begins after `step` must also finish there."""
        return self.overlap_steps == 0 or self.warm(step)
