"""`attach`: a recipe in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from pydantic import PositiveInt
from torch import nn
from typing_extensions import Unpack

from isthmus.core import State, UserError
from isthmus.outer import Offload, OuterLoop
from isthmus.recipes.base import RECIPES, Plan, Recipe
from isthmus.recipes.overrides import Overrides, as_spec, check_names, is_instance, override
from isthmus.recipes.wrapping import refuse_shared_gradients, refuse_wrapping_later
from isthmus.spec import Spec, build, convert
from isthmus.transport import TRANSPORTS, Drift, Transport
from isthmus.transport.peers import name_workers
from isthmus.transport.rendezvous import find_world


def attach(
    recipe: str | Recipe | Callable[[Plan], Recipe],
    model: nn.Module,
    steps: int,
    local_steps: int | None = None,
    transport: Transport | Spec | str = "torch_dist",
    num_workers: int | None = None,
    ranks_per_worker: int = 1,
    state_dict: State | None = None,
    **overrides: Unpack[Overrides],
) -> OuterLoop:
    """Join the other workers and train `model` with them, in a training loop of one's own.

    Call `step()` of the result after every inner step, `finish()` at the end, then `close()`. The model is on its
    device and not wrapped in DistributedDataParallel. It starts with equal weights on all workers, or with those of an
    interrupted run, if that run's `state_dict` comes with them.

    Args:
        recipe: the name of a recipe, such as "diloco", or one of your own.
        model: each worker's own.
        steps: inner steps of the whole run.
        local_steps: inner steps between two syncs of one fragment (H); None: the recipe's own.
        transport: who takes part: a transport that has not joined yet, a name, or {"type": name, ...}.
        num_workers: workers of the run; None: as many as torchrun started, or as the transport knows.
        ranks_per_worker: consecutive ranks that are one worker, over which `model` is sharded already.
        state_dict: what the outer loop's `state_dict()` returned in the run that is resumed.
        overrides: parts of the recipe to replace; see `Overrides`.

    Raises:
        UserError: something does not fit, or the workers differ.
    """
    check_names(overrides)
    _check(model, state_dict)
    spec = None if is_instance(transport, Transport) else as_spec(TRANSPORTS, transport)
    kind: Any = transport if spec is None else TRANSPORTS.get(spec["type"])
    if spec is None:
        ranks_per_worker = kind.limits.ranks_per_worker
    refuse_shared_gradients(model, ranks_per_worker)
    plan = Plan(
        num_workers or _num_workers(kind, ranks_per_worker),
        convert(steps, PositiveInt, "steps"),
        convert(local_steps, PositiveInt | None, "local_steps"),
        kind.limits.elastic,
    )
    method = override(_make_recipe(recipe, plan), overrides)
    if spec is not None:
        shared_config = _shared_config(method, plan, state_dict)
        given = {"shared_config": shared_config, "expected_workers": num_workers, "ranks_per_worker": ranks_per_worker}
        kind = build(TRANSPORTS, spec, **given)
    options = {"steps": plan.steps if plan.elastic else None, "hash_every": overrides.get("hash_every", 10)}
    try:
        loop = method.outer_loop(model, kind, Offload(overrides.get("offload")), state_dict, **options)
    except Drift as drift:
        raise UserError(
            f"{name_workers(drift.ranks)} cannot start from other weights than the rest: load the same ones everywhere "
            "before attach, or, to resume, give it what outer_loop.state_dict() returned: attach(..., state_dict=saved)"
        ) from drift
    refuse_wrapping_later(model, loop, ranks_per_worker)
    return loop


def _check(model: Any, state_dict: Any) -> None:
    """Refuse what is no model, or no state of an outer loop."""
    if not isinstance(model, nn.Module):
        raise UserError(f"attach: the model should be a torch.nn.Module, got {type(model).__name__}")
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError("attach: no parameter of the model requires a gradient: leave some trainable")
    if state_dict is not None and not (
        isinstance(state_dict, Mapping) and {"fragments", "inner_steps"} <= {*state_dict}
    ):
        raise UserError("attach: state_dict should be what outer_loop.state_dict() returned in the run that is resumed")


def _num_workers(kind: Any, ranks_per_worker: int) -> int:
    """Return how many workers a transport, or its class, knows of, or torchrun has started."""
    known = getattr(kind, "num_workers", None)  # of an instance; before it has joined perhaps only itself
    if kind.limits.elastic and not isinstance(known, int):
        raise UserError("attach: num_workers is missing: where workers come and go, say how many the run begins with")
    started = find_world()[1] // ranks_per_worker
    return max(1, started, known if isinstance(known, int) else 1)


def _make_recipe(recipe: str | Recipe | Callable[[Plan], Recipe], plan: Plan) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    made = (RECIPES.get(recipe) if isinstance(recipe, str) else recipe)(plan)
    if not isinstance(made, Recipe):
        raise UserError(f"attach: recipe {recipe!r} should return a Recipe, got {type(made).__name__}")
    return made


def _shared_config(method: Recipe, plan: Plan, state_dict: State | None) -> dict[str, str]:
    """Return what all workers must have alike, as they tell one another when they join."""
    parts = {name: getattr(method, name) for name in ("schedule", "compressor", "merge", "optimizer", "split")}
    known: dict[str, Any] = {
        name: part for name, part in parts.items() if is_dataclass(part) or isinstance(part, str | dict)
    }
    if not plan.elastic:
        known["inner steps of the resumed state"] = state_dict["inner_steps"] if state_dict else 0
    return {name: str(part) for name, part in (known | {"steps": plan.steps}).items()}
