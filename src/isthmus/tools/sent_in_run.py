"""What a worker sends in a whole run, and what methods that send as much have been measured to learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files

import yaml
from pydantic import BaseModel

from isthmus.config import RunConfig
from isthmus.tools.report import readable_bytes
from isthmus.tools.sync_traffic import StartTraffic, SyncTraffic

MEASURED = "measured_methods.yaml"


class MeasuredMethod(BaseModel, frozen=True):
    """A recipe that was run side by side with `ddp`, with a mean over seeds."""

    recipe: str
    local_steps: int
    inside: str = "adamw"  # its inner optimizer
    setting: str = ""  # beside H, where not all is the recipe's own choice
    bits: float  # sent by a worker for each parameter and inner step, the synchronous start included
    loss: float  # the evaluation loss at the end, in nats a byte
    percent: float  # by which that is above the loss of `ddp` with the same inner optimizer

    def __str__(self) -> str:
        how = ", ".join(filter(None, (f"H = {self.local_steps}", self.setting, f"{self.inside} inside")))
        return (
            f"{self.recipe} with {how}: {self.bits:.2g} bits, loss {self.loss:.3f}, "
            f"{self.percent:+.1f} % to ddp with the same inner optimizer"
        )


class MeasuredMethods(BaseModel, frozen=True):
    """All methods of one measurement; `benchmarks/equal_bytes.py` makes it."""

    conditions: str  # model, steps, workers, seeds, day
    methods: tuple[MeasuredMethod, ...]

    @classmethod
    def load(cls) -> MeasuredMethods:
        """Return what comes with the package."""
        return cls.model_validate(yaml.safe_load((files("isthmus.tools") / MEASURED).read_text("utf-8")))

    def like(self, recipe: str, inside: str, bits: float) -> MeasuredMethod | None:
        """Return the recipe's method, with this inner optimizer, that sends most nearly so much; None: not measured."""
        own = [method for method in self.methods if (method.recipe, method.inside) == (recipe, inside)]
        return min(own, key=lambda method: abs(math.log(method.bits / bits)), default=None)

    def best_within(self, bits: float) -> MeasuredMethod | None:
        """Return the lowest, of equals the smaller, of the methods that send no more; None where all send more."""
        affordable = [method for method in self.methods if method.bits <= bits]
        return min(affordable, key=lambda method: (method.loss, method.bits), default=None)


def sent_in_run(config: RunConfig, traffic: Mapping[str, SyncTraffic], start: StartTraffic | None = None) -> int:
    """Return the bytes that a worker sends in the whole run: in its synchronous start, in rounds, and at its end.

    There every fragment is averaged that was not sent after the last step. `start` is the traffic of a start that
    averages gradients.
    """
    schedule, steps = config.outer.schedule, config.train.steps
    if schedule is None:
        return steps * sum(each.sent_bytes for each in traffic.values())
    fragments = schedule.num_fragments
    in_start = sum(len(schedule.begins(step)) for step in range(1, min(steps, schedule.warm_start_steps) + 1))
    in_rounds = max(0, steps - schedule.warm_start_steps) // (schedule.local_steps // fragments)
    at_end = fragments - len(schedule.begins(steps))
    of_round = sum(each.sent_bytes for each in traffic.values())
    if start is None:
        return (in_start + in_rounds + at_end) * of_round // fragments
    of_start = min(steps, schedule.warm_start_steps) * start.gradients.sent_bytes
    of_start += in_start * start.weights.sent_bytes // fragments
    at_end_bytes = start.weights.sent_bytes if schedule.warm(steps) else of_round
    return of_start + (in_rounds * of_round + at_end * at_end_bytes) // fragments


def describe_sent(
    config: RunConfig, num_params: int, traffic: Mapping[str, SyncTraffic], start: StartTraffic | None = None
) -> Sequence[str]:
    """Return sentences on what the run sends and, with an outer loop, what methods like it have been measured to learn.

    `num_params` is the number of the model's parameters.
    """
    num_bytes = sent_in_run(config, traffic, start)
    bits = 8 * num_bytes / (num_params * config.train.steps)
    sent = f"in the run a worker sends {readable_bytes(num_bytes)}, {bits:.2g} bits for each parameter and inner step"
    if config.outer.schedule is None or not num_bytes:
        return [sent]
    measured = MeasuredMethods.load()
    said = [sent]
    if like := measured.like(config.outer.recipe, config.inner.optimizer["type"], bits):
        said.append(f"measured ({measured.conditions}), the nearest to it was {like}")
    if best := measured.best_within(bits):
        said.append(f"the lowest loss of all that sent no more had {'the same one' if best == like else best}")
    return said
