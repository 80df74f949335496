"""An outer loop as the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from isthmus.core import SyncReport
from isthmus.outer import OuterLoop, anchored


class OuterLoopMethod(OuterLoop):
    """An `OuterLoop` that also answers what the trainer asks of every `Method`."""

    evaluates: Literal["anchor", "model"] = "anchor"
    averages_gradients = False

    def __init__(self, *parts: Any, **options: Any) -> None:
        self._finished_rounds: list[int] = []
        super().__init__(*parts, **options)

    @property
    def inner_steps(self) -> int:
        """The steps of the whole run that are done, by whoever took part."""
        return self.state.inner_steps

    @property
    def is_training(self) -> bool:
        """Whether more inner steps are expected."""
        return self.state.phase == "training"

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end, on this worker and on the others."""
        return self.state.phase == "finished"

    @property
    def param_names(self) -> list[list[str]]:
        """The names of the parameters in every fragment, in order."""
        return [fragment.param_names for fragment in self.state.fragments]

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module itself: the outer loop works on its parameters."""
        return module

    def begin_step(self) -> None:
        """Note that an inner step begins now: what came before it is no training time."""
        self.local_steps.start_step(self.transport.now())

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Let the model hold the anchors for a while."""
        with torch.no_grad(), anchored(self.state.fragments):
            yield

    def take_finished_rounds(self) -> list[int]:
        """Return the lengths in steps of the rounds that all fragments have come through since the last call."""
        rounds, self._finished_rounds = self._finished_rounds, []
        return rounds

    @override
    def _take_reports(self) -> list[SyncReport]:
        reports, last = super()._take_reports(), self.state.fragments[-1].name
        ends = [report for report in reports if report.committed and report.fragment == last]
        self._finished_rounds += [self.state.schedule.round_steps(self.inner_steps)] * len(ends)
        return reports
