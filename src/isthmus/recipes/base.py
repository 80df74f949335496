"""A recipe is a function from a plan to an expression of values."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from isthmus.compress import Cast, Compressor
from isthmus.compress.quantize import Quantize
from isthmus.config import OUTER_OPTIMIZERS
from isthmus.core import SPLITS, Fragment, Registry, State, SyncSchedule, UserError
from isthmus.outer import Merge, Offload, OuterLoop, Replace
from isthmus.outer.state import OuterOptimizer
from isthmus.spec import Spec, factory
from isthmus.transport import Transport

InnerOptimizer = Literal["adamw", "muon"]  # Muon, or any other, which gets AdamW's rules


@dataclass(frozen=True)
class Plan:
    """The facts of a run on which the defaults of a method depend."""

    num_workers: int
    steps: int  # inner steps of the whole run
    local_steps: int | None = None  # H, where the user has chosen it
    elastic: bool = False  # workers may come and go: they need equal anchors
    averages_gradients: bool = False  # the training loop calls `OuterLoop.average_gradients`
    inner_optimizer: InnerOptimizer | None = None  # where the user has chosen it; None: the recipe's own


@dataclass(frozen=True)
class Recipe:
    """A method as an expression; every part is a default that a configuration may override."""

    schedule: SyncSchedule | None  # None: no outer loop, gradients are averaged at every step
    compressor: Compressor = field(default_factory=Cast)
    optimizer: Spec | OuterOptimizer = field(default_factory=lambda: {"type": "sgd", "lr": 1.0})  # outer
    merge: Merge = field(default_factory=Replace)
    split: str = "whole"
    inner: dict[str, Any] = field(default_factory=dict)  # defaults of the inner section
    # how gradients are averaged in the warm start; None: each worker steps by its own
    gradient_compressor: Compressor | None = None

    def outer_loop(
        self,
        model: nn.Module,
        transport: Transport,
        offload: Offload = Offload(),  # noqa: B008 (a frozen value)
        state_dict: State | None = None,
        **options: Any,
    ) -> OuterLoop:
        """Join the other workers with this method on `model`; `attach` is the way to it in a loop of one's own.

        Arguments are those of `attach`; the transport has not joined yet, `options` are more of `OuterLoop`.
        """
        if self.schedule is None:
            raise UserError("ddp has no outer loop: wrap the model in torch's DistributedDataParallel")
        fragments = SPLITS.get(self.split)(model, self.schedule.num_fragments)
        if state_dict is not None:
            _put_anchors(fragments, state_dict, self.compressor.replicated and self.merge.replicated)
        spec = self.optimizer
        outer_optimizer = spec if callable(spec) else factory(OUTER_OPTIMIZERS, spec, "params")
        parts = (fragments, self.schedule, self.compressor, transport, outer_optimizer, self.merge)
        loop = OuterLoop(*parts, offload=offload, gradient_compressor=self.gradient_compressor, **options)
        if state_dict is not None and not loop.has_caught_up:
            loop.load_state_dict(dict(state_dict))
        return loop


_NAMES = ("ddp", "diloco", "opendiloco", "streaming", "eager", "dilocox", "dct_momentum", "sparseloco", "muloco")
_PAPERS = {f"{name}_paper": f"isthmus.recipes.papers:{name}" for name in _NAMES if name != "ddp"}
RECIPES = Registry("recipe", {name: f"isthmus.recipes.{name}:{name}" for name in _NAMES}, variants=_PAPERS)


def make_recipe(recipe: str | Recipe | Callable[[Plan], Recipe], plan: Plan) -> Recipe:
    """Return the recipe of this name, or what a function makes of the plan.

    Raises:
        UserError: it is no function of a `Plan`, or returns no `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    function = RECIPES.get(recipe) if isinstance(recipe, str) else recipe
    try:
        inspect.signature(function).bind(plan)
    except (TypeError, ValueError):
        raise UserError(f"recipe {recipe!r} should be a function from a Plan to a Recipe, got {function!r}") from None
    made = function(plan)
    if not isinstance(made, Recipe):
        raise UserError(f"recipe {recipe!r} should return a Recipe, got {made!r}")
    return made


def _put_anchors(fragments: list[Fragment], state_dict: State, replicated: bool) -> None:
    """Set the anchors before workers compare them: the local parameters of a resumed run differ between workers.

    Private anchors differ, too; until they are loaded all workers hold zeros.
    """
    saved = [fragment["anchor"] for fragment in state_dict["fragments"]]
    shapes = [[anchor.shape for anchor in anchors] for anchors in saved]
    if shapes != [[anchor.shape for anchor in fragment.anchor] for fragment in fragments]:
        raise UserError(
            "the saved outer state is of another model or another recipe: give attach the same ones as in that run"
        )
    for fragment, anchors in zip(fragments, saved, strict=True):
        for anchor, value in zip(fragment.anchor, anchors, strict=True):
            anchor.data.copy_(value if replicated else torch.zeros(()))


TWO_BITS = Quantize(bits=2, block=32, scale_bits=8)  # 2.25 bits a value
KEPT = 0.5  # share of a worker's own progress that it goes on from while a sync takes a whole round
PLAIN_SGD: Spec = {"type": "sgd", "lr": 1.0}  # outer, around a decayed residual, which plays the part of momentum
MUON: dict[str, Any] = {"optimizer": {"type": "muon"}}  # an inner section
FAST_MUON: dict[str, Any] = {"optimizer": {"type": "muon", "lr": 0.014}}  # where only a part of the values crosses
_ADAMW_START = 2  # inner steps between two syncs of the start with AdamW inside
_GRADIENT_START = 50  # at most, where gradients are averaged: workers stay alike by themselves
MUON_START = 8  # the same with Muon inside, where all values cross
SPARSE_START = 10  # the same where only a part crosses, for 100 times fewer bytes than diloco sends
_MOST_MOMENTUM: dict[InnerOptimizer, float] = {"adamw": 0.8, "muon": 0.6}  # outer, by what is inside


def optimizer_family(*names: str) -> InnerOptimizer:
    """Return the family whose rules suit optimizers of these class names: Muon's where one of them is a Muon."""
    return "muon" if any("muon" in name.lower() for name in names) else "adamw"


def outer_sgd(plan: Plan, local_steps: int, default: InnerOptimizer = "adamw") -> Spec:
    """The outer optimizer: SGD with Nesterov momentum.

    The best learning rate does not depend on the size of the model and grows with the number of workers: 0.4 for
    1, 0.6 for 2 to 7, 0.8 from 8 on (Scaling Laws for DiLoCo, arXiv 2503.09799). Momentum is min(m, H / 8), with
    m = 0.8 around AdamW and 0.6 around Muon (MuLoCo, arXiv 2505.23725): the less the workers part in a round, the less
    there is to gain by going further than their mean (docs/learning.md).

    Args:
        plan: of the run.
        local_steps: H.
        default: the recipe's own inner optimizer, where the plan has no other.
    """
    lr = 0.4 if plan.num_workers == 1 else 0.6 if plan.num_workers < 8 else 0.8
    momentum = min(_MOST_MOMENTUM[plan.inner_optimizer or default], local_steps / 8)
    return {"type": "sgd", "lr": lr, "momentum": momentum, "nesterov": True}


def warm_start(plan: Plan, local_steps: int, muon_every: int = _ADAMW_START) -> dict[str, int]:
    """The schedule's warm start: half of the run, at most 800 steps, in whole intervals between its syncs.

    Rounds of H steps harm most while the learning rate is high, so where they are long a start that reaches far, with
    few syncs, learns more for equal bytes than a short and dense one (docs/learning.md).

    Args:
        plan: of the run.
        local_steps: H.
        muon_every: inner steps between two of its syncs where Muon is inside, two where AdamW is; at most H.
    """
    every = min(_ADAMW_START if plan.inner_optimizer == "adamw" else muon_every, local_steps)
    return {"warm_start_steps": _start_steps(plan) // every * every, "warm_start_every": every}


def adamw_start(plan: Plan, local_steps: int) -> dict[str, int]:
    """The warm start with AdamW inside: where gradients are averaged workers step alike, and few syncs do.

    There are at least five, because between them the anchor, which is what is evaluated, stands still.
    """
    if not plan.averages_gradients:
        return warm_start(plan, local_steps)
    steps = _start_steps(plan)
    return {"warm_start_steps": steps, "warm_start_every": max(1, min(_GRADIENT_START, steps // 5))}


def muon_start_lr(plan: Plan) -> float:
    """The outer learning rate of the warm start with Muon inside, where workers average weights: 1.41, alone 1.

    Muon's steps have one length, however much of a worker's gradient is the noise of its own batch, so the mean of
    several is shorter than the step on the batch of all. With 4 to 32 workers about 1.4 is best; M^(1/4), which grows
    with their number, overshoots from 16 on (docs/log.md). With AdamW in Muon's place it is 1.
    """
    return 1.41 if plan.num_workers > 1 and plan.inner_optimizer != "adamw" else 1.0


def _start_steps(plan: Plan) -> int:
    return min(plan.steps // 2, 800)


def delay(plan: Plan, local_steps: int, start: dict[str, int]) -> int:
    """Inner steps that a sync may take (tau) where a method waits a round for it: H, or a 32nd of the run.

    What workers learn while a sync is under way is half lost, and the last sync's share of the run is the larger the
    fewer there are, so below 32 of them each must be back sooner (docs/learning.md).

    Args:
        plan: of the run.
        local_steps: H.
        start: the schedule's warm start, whose steps do not count.
    """
    return min(local_steps, max(1, (plan.steps - start["warm_start_steps"]) // 32))


def share_to_send(
    plan: Plan, local_steps: int, start: dict[str, int], crossings: int, least: float, most: float
) -> float:
    """Part of all values, or of all directions, that cross in a sync: enough for each to cross `crossings` times.

    What error feedback still holds when a run ends was learnt in vain, so few syncs must send more each: at most
    `most`, but everything once (docs/learning.md).

    Args:
        plan: of the run.
        local_steps: H.
        start: the schedule's warm start.
        crossings: on average, in all syncs after the start.
        least: the smallest part, of long runs: the paper's.
        most: the largest part, of short runs, where that is enough for everything to cross once.
    """
    syncs = max(1, (plan.steps - start["warm_start_steps"]) // local_steps)
    return max(1 / syncs, min(most, max(least, crossings / syncs)))
