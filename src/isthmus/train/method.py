"""The questions that the trainer asks of a method, which data parallelism and an outer loop answer alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn
from typing_extensions import override

from isthmus.core import SyncReport
from isthmus.outer import OuterLoop, anchored
from isthmus.transport import Transport


class Method(Protocol):
    """A way to train one model on several workers: `step()` after every inner step, `finish()` at the end."""

    evaluates: Literal["anchor", "model"]  # what stands for the run's result while it goes on
    averages_in_backward: bool  # gradients, in every backward pass, which cannot go on without the other workers
    transport: Transport

    @property
    def inner_steps(self) -> int:
        """The steps of the whole run that are done, by whoever took part."""

    @property
    def is_training(self) -> bool:
        """Whether more inner steps are expected: neither has `finish` begun nor have the others come to the end."""
        return not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end, on this worker and on the others."""

    @property
    def has_caught_up(self) -> bool:
        """Whether this worker, which has just come, has taken over what others had learnt."""
        return False

    @property
    def param_names(self) -> list[list[str]]:
        """The names of the parameters in every fragment, in order; empty where there are no anchors."""
        return []

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what the inner step is to train in the place of a module with a loss."""
        return module

    def average_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over workers, where the method asks for it after a backward pass."""
        return

    def begin_step(self) -> None:
        """Note that an inner step begins now: what came before it (evaluation, checkpoints) is no training time."""
        return

    def step(self) -> list[SyncReport]:
        """Count one inner step and sync what is due; return a report for every sync that has finished."""

    def skip(self) -> list[SyncReport]:
        """Go on to the next sync without training, where there is nothing to train on until then."""
        return []

    def finish(self) -> list[SyncReport]:
        """End the run; in an elastic world training may have to go on afterwards (`is_training`)."""

    def close(self) -> None:
        """Leave the other workers."""

    @property
    def num_rollbacks(self) -> int:
        """How often all workers have gone back to their last good anchors."""
        return 0

    def note_evaluation(self, loss: float) -> None:
        """Judge the loss that the worker which evaluates has found; all may go back with the next sync."""
        return

    def anchored(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds what `evaluates` names."""

    def take_finished_rounds(self) -> list[int]:
        """Return the lengths in steps of the rounds that all fragments have come through since the last call."""

    def anchor_hash(self) -> str:
        """Return 16 hexadecimal digits that differ when any bit differs of what `evaluates` names."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model's own parameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""


class OuterLoopMethod(OuterLoop, Method):
    """An `OuterLoop` that also answers what the trainer asks of every `Method`."""

    evaluates: Literal["anchor", "model"] = "anchor"
    averages_in_backward = False

    def __init__(self, *parts: Any, **options: Any) -> None:
        self._finished_rounds: list[int] = []
        super().__init__(*parts, **options)

    @property
    @override
    def inner_steps(self) -> int:
        return self.state.inner_steps

    @property
    @override
    def is_training(self) -> bool:
        return self.state.phase == "training"

    @property
    @override
    def is_finished(self) -> bool:
        return self.state.phase == "finished"

    @property
    @override
    def num_rollbacks(self) -> int:
        return self.state.rollbacks.number

    @property
    @override
    def param_names(self) -> list[list[str]]:
        return [fragment.param_names for fragment in self.state.fragments]

    @override
    def begin_step(self) -> None:
        self.local_steps.start_step(self.transport.now())

    @override
    @contextmanager
    def anchored(self) -> Iterator[None]:
        with torch.no_grad(), anchored(self.state.fragments):
            yield

    @override
    def take_finished_rounds(self) -> list[int]:
        rounds, self._finished_rounds = self._finished_rounds, []
        return rounds

    @override
    def _take_reports(self) -> list[SyncReport]:
        reports, last = super()._take_reports(), self.state.fragments[-1].name
        ends = [report for report in reports if report.committed and report.fragment == last]
        self._finished_rounds += [self.state.schedule.round_steps(self.inner_steps)] * len(ends)
        return reports
