"""Event files for TensorBoard, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import Tracker, need, numbers


class TensorBoard(Tracker):
    """Writes all figures of a worker to a folder, which TensorBoard shows as one run."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._make_writer = need("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._writer: Any = None

    @override
    def begin(self, step: int, totals: Totals) -> None:
        """Begin; what was written after `step`, before the run went on from there, is hidden."""
        self._writer = self._make_writer(str(self._folder), purge_step=step + 1)

    @override
    def take(self, event: str, values: Mapping[str, Any]) -> None:
        for name, value in numbers(event, values).items():
            self._writer.add_scalar(name, value, values["step"])
        if event == "fault":
            self._writer.add_text("fault", values["reason"], values["step"])

    @override
    def close(self) -> None:
        if self._writer:
            self._writer.close()
