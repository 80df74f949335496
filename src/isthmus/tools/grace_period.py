"""The grace period of a worker: how long it may take from SIGTERM to its end, with a checkpoint behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from isthmus.config import RunConfig
from isthmus.tools.report import readable_bytes
from isthmus.tools.sync_traffic import readable_seconds
from isthmus.train.assemble import is_elastic
from isthmus.train.trackers.base import PATIENCE_SECONDS

_STATIC_BUDGETS = 3  # the sync of the last step, the others' answers (`train/stopping.py`), what is in flight then
_ELASTIC_BUDGETS = 1  # the sync under way: nobody else is waited for
_DISK_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True)
class GracePeriod:
    """The parts of the time that a worker may need; what is not known before is how long an inner step takes."""

    num_steps: int  # inner steps, or as long: an evaluation
    sync_seconds: float
    tracker_seconds: float
    checkpoint_bytes: int

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module) -> GracePeriod:
        """Return that of a configuration and its model, or the outline of that; each part is the most it can take.

        Where all workers stop together, one that is behind trains on until it has caught up with the fastest, which
        may be a round ahead.
        """
        schedule, train, track = config.outer.schedule, config.train, config.track
        elastic, alone = is_elastic(config), train.workers == 1
        behind = 0 if elastic or alone or schedule is None else schedule.local_steps
        budgets = _ELASTIC_BUDGETS if elastic else 0 if alone else _STATIC_BUDGETS
        tracked = track.tensorboard or track.wandb is not None or track.prometheus_port is not None
        return cls(
            num_steps=1 + behind + train.eval_batches,
            sync_seconds=budgets * config.outer.transport["sync_budget_seconds"],
            tracker_seconds=PATIENCE_SECONDS if tracked else 0.0,
            checkpoint_bytes=checkpoint_bytes(config, model),
        )

    @property
    def write_seconds(self) -> float:
        """The time to write the checkpoint, modelled."""
        return self.checkpoint_bytes / _DISK_BYTES_PER_SECOND

    def seconds(self, step_seconds: float) -> float:
        """Return all of it, where an inner step takes so long."""
        return self.num_steps * step_seconds + self.sync_seconds + self.tracker_seconds + self.write_seconds

    def describe(self, step_seconds: float | None = None) -> str:
        """Return a sentence that says what it is and what it is made of."""
        total = f"{self.seconds(step_seconds or 0.0):,.1f} s"
        written = f"{readable_bytes(self.checkpoint_bytes)} at {readable_bytes(_DISK_BYTES_PER_SECOND)}/s, modelled"
        steps = f"{self.num_steps} inner step{'s'[: self.num_steps - 1]}"
        if step_seconds is None:
            total, steps = f"{total} and {steps}", f"{steps} (--step-seconds says how long one is)"
        else:
            steps = f"{readable_seconds(self.num_steps * step_seconds)} for {steps}"
        parts = [
            f"{self.sync_seconds:g} s for syncs under way" if self.sync_seconds else "",
            f"{readable_seconds(self.write_seconds)} to write {written}",
            f"{self.tracker_seconds:g} s for the trackers" if self.tracker_seconds else "",
        ]
        return f"from SIGTERM to its end a worker takes up to {total}: {', '.join(filter(None, parts))}, and {steps}"


def checkpoint_bytes(config: RunConfig, model: nn.Module) -> int:
    """Return how large a checkpoint of all ranks of a worker may become.

    Beside the model it holds two moments of the inner optimizer, and with an outer loop anchors, outer momentum and a
    residual, all float32; with an overlap what is in flight, and what a rollback goes back to.
    """
    copies, outer = 2, config.outer
    if outer.schedule is not None:
        copies += 3 + (outer.schedule.overlap_steps > 0) + 2 * (outer.rollback is not None)
    own: int = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return own + 4 * copies * sum(param.numel() for param in model.parameters())
