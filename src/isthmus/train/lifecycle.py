"""What differs between a worker of a static world, where all go on together, and one that may come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from isthmus.core import State
from isthmus.inner.step import Batch
from isthmus.train.common_checkpoints import MissingCheckpoints
from isthmus.train.stopping import Stopping
from isthmus.transport import Transport


class TrainingBatches(Protocol):
    """The batches of one worker."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens a batch trains on; images or seconds of sound, where there are no tokens."""
        ...

    def __next__(self) -> Batch:
        """Return the next batch, or raise `LeasesExhausted` where a commit has to come first."""
        ...


class Lifecycle(Protocol):
    """How a worker gets its batches, begins, stops and comes back."""

    batches: TrainingBatches
    transport_options: dict[str, Any]  # which the configuration does not hold

    def batches_state(self, method_state: State) -> State:
        """Return the position in the batches that belongs to a saved state of the method."""
        ...

    def load_batches_state(self, state: State) -> None:
        """Go on from a saved position in the batches."""
        ...

    def choose_checkpoint(self, usable_steps: list[int], transport: Transport) -> int | None:
        """Return the step to go on from, of those whose checkpoint this rank can use; None begins anew.

        Raises:
            UserError: the run cannot go on.
        """
        ...

    def has_caught_up(self, method_state: State) -> bool:
        """Whether the method has taken over the other workers' state already, which is newer than any checkpoint."""
        ...

    def kept_metrics_bytes(self, path: Path, saved_bytes: int) -> int:
        """Return how much of a metrics file is kept when the run goes on from a checkpoint that counted so many."""
        ...

    def begin(self, save: Callable[[], None] | None, transport: Transport) -> None:
        """Make ready for the first step of a run; `save` writes a first checkpoint, where checkpoints are wanted."""
        ...

    def missing_checkpoints(self) -> MissingCheckpoints:
        """Return the steps whose checkpoint some worker could not write; to be called by all ranks."""
        ...

    def stopping(self, transport: Transport) -> Stopping:
        """Return the agreement about the last step; to be called by all ranks."""
        ...

    def how_to_resume(self, step: int) -> str:
        """Return the line that says how a stopped run goes on; empty where another process writes it."""
        ...
