"""What a recipe is: a function from a plan to an expression of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from isthmus.compress import Cast, Compressor
from isthmus.config import OUTER_OPTIMIZERS, Spec, factory
from isthmus.core import SPLITS, Registry, SyncSchedule, UserError
from isthmus.outer import Merge, OuterLoop, Replace
from isthmus.transport import Transport
from isthmus.transport.rendezvous import find_world
from isthmus.transport.torch_dist import TorchDist


@dataclass(frozen=True)
class Plan:
    """What the defaults of a method depend on."""

    num_workers: int
    steps: int  # inner steps of the whole run
    local_steps: int | None = None  # H, where the user has chosen it


@dataclass(frozen=True)
class Recipe:
    """A method as an expression; every part is a default that a configuration may override."""

    schedule: SyncSchedule | None  # None: no outer loop, gradients are averaged at every step
    compressor: Compressor = field(default_factory=Cast)
    optimizer: Spec = field(default_factory=lambda: {"type": "sgd", "lr": 1.0})  # outer
    merge: Merge = field(default_factory=Replace)
    split: str = "whole"
    inner: dict[str, Any] = field(default_factory=dict)  # defaults of the inner section

    def outer_loop(self, model: nn.Module, transport: Transport) -> OuterLoop:
        """This method on `model`, for a training loop of one's own; joins the other workers."""
        if self.schedule is None:
            raise UserError("ddp has no outer loop: wrap the model in torch's DistributedDataParallel")
        return OuterLoop(
            SPLITS.get(self.split)(model, self.schedule.num_fragments),
            self.schedule,
            self.compressor,
            transport,
            factory(OUTER_OPTIMIZERS, self.optimizer, "params"),
            self.merge,
        )


RECIPES = Registry(
    "recipe",
    {
        name: f"isthmus.recipes.{name}:{name}"
        for name in (
            "ddp",
            "diloco",
            "opendiloco",
            "streaming",
            "eager",
            "dilocox",
            "dct_momentum",
            "sparseloco",
            "muloco",
        )
    },
)


def attach(name: str, model: nn.Module, steps: int, local_steps: int | None = None) -> OuterLoop:
    """Join the other workers (torchrun's ranks) and train `model` with them, in a training loop of one's own.

    Call `step()` of the result after every inner step, `finish()` at the end. The model must be on its device and
    start with equal weights on all workers.

    Args:
        name: a recipe, such as "diloco".
        model: each worker's own, not wrapped in DistributedDataParallel.
        steps: inner steps of the whole run.
        local_steps: inner steps between two syncs (H); None: the recipe's own.
    """
    _, num_workers = find_world()
    return RECIPES.get(name)(Plan(num_workers, steps, local_steps)).outer_loop(model, TorchDist())


def outer_sgd(plan: Plan, momentum: float = 0.9) -> Spec:
    """The outer optimizer: SGD with Nesterov momentum.

    The best learning rate does not depend on the size of the model and grows with the number of workers: 0.4 for
    1, 0.6 for 2 and 4, 0.8 for 8 (Scaling Laws for DiLoCo, arXiv 2503.09799).
    """
    lr = 0.4 if plan.num_workers == 1 else 0.6 if plan.num_workers <= 4 else 0.8
    return {"type": "sgd", "lr": lr, "momentum": momentum, "nesterov": True}
