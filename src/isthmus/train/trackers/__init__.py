"""Trackers show a run besides its metrics files: TensorBoard, Weights & Biases, Prometheus."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.config import RunConfig
from isthmus.train.assemble import shared_keys
from isthmus.train.process import Process
from isthmus.train.run_folder import name_of
from isthmus.train.trackers.base import Tracker, Trackers
from isthmus.train.trackers.prometheus import Prometheus
from isthmus.train.trackers.tensorboard import TensorBoard
from isthmus.train.trackers.weights_and_biases import WeightsAndBiases

__all__ = ["Tracker", "Trackers", "open_trackers"]


def open_trackers(config: RunConfig, process: Process) -> Trackers:
    """Open the trackers that the configuration asks for; the first rank of a worker has them for all of its ranks."""
    track, run_dir, worker = config.track, Path(config.train.run_dir), name_of(process.worker)
    trackers: list[Tracker] = []
    if process.is_first_rank and track.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard" / worker))
    if process.is_first_rank and track.wandb is not None:
        trackers.append(WeightsAndBiases(track.wandb, run_dir, worker, shared_keys(config)))
    if process.is_first_rank and track.prometheus_port is not None:
        labels = {"run": run_dir.name, "worker": str(process.worker)}
        on_this_machine = int(os.environ.get("LOCAL_RANK", "0")) // process.mesh.num_ranks
        trackers.append(Prometheus(track.prometheus_port + on_this_machine, labels, config.train.steps))
    return Trackers(trackers)
