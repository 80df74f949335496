"""What the trainer asks of a method, which an outer loop and data parallelism answer alike."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import nn

from isthmus.core import SyncReport
from isthmus.transport import Transport


class Method(Protocol):
    """A way to train one model on several workers: `step()` after every inner step, `finish()` at the end."""

    evaluates: Literal["anchor", "model"]  # what stands for the run's result while it goes on
    averages_gradients: bool  # inside the inner step, which therefore cannot go on without the other workers
    transport: Transport

    @property
    def inner_steps(self) -> int:
        """The steps of the whole run that are done, by whoever took part."""
        ...

    @property
    def is_training(self) -> bool:
        """Whether more inner steps are expected: neither has `finish` begun nor have the others come to the end."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end, on this worker and on the others."""
        ...

    @property
    def param_names(self) -> list[list[str]]:
        """The names of the parameters in every fragment, in order; empty where there are no anchors."""
        ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what the inner step is to train in the place of a module with a loss."""
        ...

    def begin_step(self) -> None:
        """Note that an inner step begins now: what came before it (evaluation, checkpoints) is no training time."""
        ...

    def step(self) -> list[SyncReport]:
        """Count one inner step and sync what is due; return a report for every sync that has finished."""
        ...

    def skip(self) -> list[SyncReport]:
        """Go on to the next sync without training, where there is nothing to train on until then."""
        ...

    def finish(self) -> list[SyncReport]:
        """End the run; in an elastic world training may have to go on afterwards (`is_training`)."""
        ...

    def close(self) -> None:
        """Leave the other workers."""
        ...

    def anchored(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds what `evaluates` names."""
        ...

    def take_finished_rounds(self) -> list[int]:
        """Return the lengths in steps of the rounds that all fragments have come through since the last call."""
        ...

    def anchor_hash(self) -> str:
        """Return 16 hexadecimal digits that differ when any bit differs of what `evaluates` names."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model's own parameters."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        ...
