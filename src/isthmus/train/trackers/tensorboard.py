"""Event files for TensorBoard, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import need, numbers


class TensorBoard:
    """Writes all figures of a worker to a folder, which TensorBoard shows as one run.

    Args:
        folder: of this worker.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._make_writer = need("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, step: int, totals: Totals) -> None:
        """What was written after `step`, by a run that went on from there later, is hidden."""
        self._writer = self._make_writer(str(self._folder), purge_step=step + 1)

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Its numbers as scalars; a fault as text."""
        for name, value in numbers(event, values).items():
            self._writer.add_scalar(name, value, values["step"])
        if event == "fault":
            self._writer.add_text("fault", values["reason"], values["step"])

    def close(self) -> None:
        """Have everything on the disk."""
        if self._writer:
            self._writer.close()
