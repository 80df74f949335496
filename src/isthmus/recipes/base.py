"""What a recipe is: a function from a plan to an expression of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from isthmus.compress import Cast, Compressor
from isthmus.config import OUTER_OPTIMIZERS
from isthmus.core import SPLITS, Registry, SyncSchedule, UserError
from isthmus.outer import Merge, Offload, OuterLoop, Replace
from isthmus.spec import Spec, factory
from isthmus.transport import Transport
from isthmus.transport.rendezvous import find_world
from isthmus.transport.torch_dist import TorchDist


@dataclass(frozen=True)
class Plan:
    """What the defaults of a method depend on."""

    num_workers: int
    steps: int  # inner steps of the whole run
    local_steps: int | None = None  # H, where the user has chosen it
    elastic: bool = False  # workers may come and go: they need equal anchors


@dataclass(frozen=True)
class Recipe:
    """A method as an expression; every part is a default that a configuration may override."""

    schedule: SyncSchedule | None  # None: no outer loop, gradients are averaged at every step
    compressor: Compressor = field(default_factory=Cast)
    optimizer: Spec = field(default_factory=lambda: {"type": "sgd", "lr": 1.0})  # outer
    merge: Merge = field(default_factory=Replace)
    split: str = "whole"
    inner: dict[str, Any] = field(default_factory=dict)  # defaults of the inner section

    def outer_loop(self, model: nn.Module, transport: Transport, offload: Offload = Offload()) -> OuterLoop:  # noqa: B008
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
            offload=offload,
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


def attach(
    name: str,
    model: nn.Module,
    steps: int,
    local_steps: int | None = None,
    ranks_per_worker: int = 1,
    offload: str | None = None,
) -> OuterLoop:
    """Join the other workers (torchrun's ranks) and train `model` with them, in a training loop of one's own.

    Call `step()` of the result after every inner step, `finish()` at the end. The model must be on its device and
    start with equal weights on all workers.

    Args:
        name: a recipe, such as "diloco".
        model: each worker's own, not wrapped in DistributedDataParallel.
        steps: inner steps of the whole run.
        local_steps: inner steps between two syncs (H); None: the recipe's own.
        ranks_per_worker: over which `model` is sharded already, by FSDP2 for instance: as many consecutive ranks are
            one worker.
        offload: "cpu" keeps anchors and other outer state in CPU memory between syncs.
    """
    _, num_ranks = find_world()
    plan = Plan(num_ranks // ranks_per_worker, steps, local_steps)
    return RECIPES.get(name)(plan).outer_loop(model, TorchDist(ranks_per_worker=ranks_per_worker), Offload(offload))


MUON: dict[str, Any] = {"optimizer": {"type": "muon"}}  # an inner section
FAST_MUON: dict[str, Any] = {"optimizer": {"type": "muon", "lr": 0.02}}  # where few directions cross
_LARGE_H = 8
_MANY_OUTER_STEPS = 500  # from here on a run is long, as in the papers, and their momentum is right


def outer_sgd(plan: Plan, local_steps: int, short_run_momentum: float = 0.8) -> Spec:
    """The outer optimizer: SGD with Nesterov momentum.

    The best learning rate does not depend on the size of the model and grows with the number of workers: 0.4 for
    1, 0.6 for 2 to 7, 0.8 from 8 on (Scaling Laws for DiLoCo, arXiv 2503.09799). Momentum 0.9 moves the anchor by up
    to ten pseudo-gradients, too far where few outer steps are to come: 0.8 then, and less where a round of delay comes
    on top. Where H is so small that workers hardly part, at most 0.6 however long the run (docs/learning.md).

    Args:
        plan: the run.
        local_steps: H, which with the length of the run makes the number of outer steps.
        short_run_momentum: where few outer steps are to come.
    """
    lr = 0.4 if plan.num_workers == 1 else 0.6 if plan.num_workers < 8 else 0.8
    if local_steps < _LARGE_H:
        momentum = min(0.6, short_run_momentum)
    elif plan.steps // local_steps >= _MANY_OUTER_STEPS:
        momentum = 0.9
    else:
        momentum = short_run_momentum
    return {"type": "sgd", "lr": lr, "momentum": momentum, "nesterov": True}


def muon_outer(local_steps: int) -> Spec:
    """The outer optimizer around Muon: MuLoCo's 0.7 / 0.6 (arXiv 2505.23725), with momentum 0.4 below H = 20.

    The less the workers part, the less there is to gain by going further than their mean (docs/learning.md).

    Args:
        local_steps: H.
    """
    return {"type": "sgd", "lr": 0.7, "momentum": 0.6 if local_steps >= 20 else 0.4, "nesterov": True}


def warm_start(plan: Plan) -> int:
    """Inner steps of the synchronous warm start: an eighth of the run, at most 400 (docs/learning.md)."""
    return min(plan.steps // 8, 400)
