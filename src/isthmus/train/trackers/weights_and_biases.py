"""Weights & Biases: each worker a run, all of them one group."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import Tracker, need, numbers

_LOGGER = logging.getLogger(__name__)


class WeightsAndBiases(Tracker):
    """Logs all figures of a worker with `wandb`.

    Its key comes from the environment (WANDB_API_KEY) and is kept nowhere. Without one, or with WANDB_MODE=offline,
    everything stays in the run's folder, from where `wandb sync` sends it. The group is called after that folder, the
    run there after its worker, such as "worker-1".
    """

    name = "wandb"

    def __init__(self, project: str, run_dir: Path, worker: str, config: dict[str, Any]) -> None:
        self._wandb = need("wandb")
        self._project, self._run_dir, self._worker, self._config = project, run_dir, worker, config
        self._mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run: Any = None

    @override
    def begin(self, step: int, totals: Totals) -> None:
        """Begin; a run that goes on is the same one there."""
        self._run = self._wandb.init(
            project=self._project,
            group=self._run_dir.name,
            name=f"{self._run_dir.name} {self._worker}",
            id=self._identity(),
            resume="allow" if self._mode == "online" else None,
            dir=self._run_dir,
            config=self._config,
            mode=self._mode,
            # an address of a git remote may hold a password; what is printed goes to the log already
            settings=self._wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self._run.define_metric("*", step_metric="step")
        if self._mode == "offline":
            _LOGGER.info("wandb is offline; send the run later with: wandb sync %s", Path(self._run.dir).parent)

    @override
    def take(self, event: str, values: Mapping[str, Any]) -> None:
        self._run.log({**numbers(event, values), "step": values["step"]})

    @override
    def close(self) -> None:
        if self._run:
            self._run.finish()
            # an offline run's file is written behind finish's back; only the end of W&B's own process is waited for
            self._wandb.teardown()

    def _identity(self) -> str:
        path = self._run_dir / "wandb" / f"{self._worker}.id"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uuid.uuid4().hex[:16])
        return path.read_text()
