"""`attach` is the way to a recipe in a training loop of one's own."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypedDict, TypeVar

from pydantic import PositiveInt
from torch import nn
from typing_extensions import Unpack, get_protocol_members

from isthmus.compress import AGGREGATIONS, COMPRESSORS, Compressor
from isthmus.config import OUTER_OPTIMIZERS, try_optimizer, with_aggregation
from isthmus.core import Registry, State, SyncSchedule, UserError, nearest
from isthmus.core.imports import own_code
from isthmus.outer import MERGES, Guard, Merge, Offload, OuterLoop, Rollback
from isthmus.outer.state import OuterOptimizer
from isthmus.recipes.base import InnerOptimizer, Plan, Recipe, make_recipe
from isthmus.recipes.wrapping import refuse_shared_gradients, refuse_wrapping_later
from isthmus.spec import Spec, build, complete, convert, factory, read_arguments
from isthmus.transport import TRANSPORTS, Drift, Transport
from isthmus.transport.peers import name_workers
from isthmus.transport.rendezvous import find_world

_LOGGER = logging.getLogger(__name__)
Value = TypeVar("Value")


class Overrides(TypedDict, total=False):
    """Arguments of `attach` that replace parts of a recipe; what is left out is the recipe's own.

    A component is a value (`Float4("E3M0")`), a name ("float4"), or what stands in a configuration file
    ({"type": "float4", "format": "E3M0"}).
    """

    num_fragments: int  # parts of the model that are synced one after the other
    overlap_steps: int  # inner steps between sending a fragment and finishing its sync
    warm_start_steps: int  # inner steps at the start of the run that are synced more often
    warm_start_every: int  # inner steps between two syncs of the warm start
    warm_start_lr: float  # outer learning rate of the warm start; 1: the anchor becomes the mean of the workers
    # whether the training loop calls `outer_loop.average_gradients(model.parameters())` after every backward pass: then
    # the recipe may have workers average their gradients in the warm start
    averages_gradients: bool
    # the loop's own: "muon", or "adamw" for any other; where nothing is said, the one that the recipe counts on
    inner_optimizer: InnerOptimizer
    gradient_compressor: Compressor | Spec | str | None  # how their mean is taken; None: each worker steps by its own
    compressor: Compressor | Spec | str  # how the mean of the workers' pseudo-gradients is taken in few bytes
    aggregation: Spec | str  # what becomes of the workers' messages: "mean", or a robust one such as "median"
    merge: Merge | Spec | str  # how a new anchor and the local parameters combine
    # the outer optimizer; as a value, a function that makes one: `partial(SGD, lr=0.7)`
    optimizer: OuterOptimizer | Spec | str
    split: str  # how the model is cut into fragments: "whole", "strided" or "balanced"
    hash_every: int  # rounds between two comparisons of a fragment's hash over all workers
    # whose pseudo-gradient is left out: `Guard(max_norm_factor=20)`, or the same as {"max_norm_factor": 20}; None in
    # the place of the number: however long it is
    guard: Guard | Mapping[str, Any]
    # `Rollback(max_loss_factor=2)`, or the same as a mapping: whenever `outer_loop.note_evaluation(loss)`, which one
    # worker calls, finds a loss so many times the best, all go back to the last good anchors; None: never
    rollback: Rollback | Mapping[str, Any] | None
    offload: str | None  # "cpu" keeps anchors and other outer state in CPU memory between syncs


_PARTS = ("schedule", "compressor", "merge", "optimizer", "split", "gradient_compressor")
_OF_SCHEDULE = {field.name: field.type for field in fields(SyncSchedule) if field.name != "local_steps"}


@own_code()
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
    _check(model, state_dict, overrides)
    spec = None if _is_instance(transport, Transport) else _as_spec(TRANSPORTS, transport)
    kind: Any = transport if spec is None else TRANSPORTS.get(spec["type"])
    ranks_per_worker = kind.limits.ranks_per_worker if spec is None else ranks_per_worker
    refuse_shared_gradients(model, ranks_per_worker)
    plan = Plan(
        num_workers or _num_workers(kind, ranks_per_worker),
        convert(steps, PositiveInt, "steps"),
        convert(local_steps, PositiveInt | None, "local_steps"),
        kind.limits.elastic,
        *_of_loop(overrides, kind.limits.elastic),
    )
    method = _override(_make_recipe(recipe, plan), overrides)
    options = _options(plan, overrides)
    if spec is not None:
        shared_config = _shared_config(method, plan, options, state_dict)
        given = {"shared_config": shared_config, "expected_workers": num_workers, "ranks_per_worker": ranks_per_worker}
        if kind.limits.elastic:
            given["resumes"] = state_dict is not None
        kind = build(TRANSPORTS, spec, **given)
    try:
        loop = method.outer_loop(model, kind, Offload(overrides.get("offload")), state_dict, **options)
    except Drift as drift:
        raise UserError(
            f"{name_workers(drift.ranks)} cannot start from other weights than the rest: load the same ones everywhere "
            "before attach, or, to resume, give it what outer_loop.state_dict() returned: attach(..., state_dict=saved)"
        ) from drift
    refuse_wrapping_later(model, loop, ranks_per_worker)
    return loop


def _check(model: Any, state_dict: Any, overrides: Overrides) -> None:
    """Refuse what is no model, no state of an outer loop, or no argument of `attach`."""
    for name in overrides:
        if name not in Overrides.__annotations__:
            known = [*attach.__annotations__.keys() - {"return", "overrides"}, *Overrides.__annotations__]
            raise UserError(f"attach has no argument {name!r}: {nearest(name, known)}")
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


def _of_loop(overrides: Overrides, elastic: bool) -> tuple[bool, InnerOptimizer | None]:
    """Return what a plan says of the training loop: whether it averages gradients, and what is inside."""
    averages = convert(overrides.get("averages_gradients", False), bool, "averages_gradients")
    return averages and not elastic, convert(overrides.get("inner_optimizer"), InnerOptimizer | None, "inner_optimizer")


def _make_recipe(recipe: str | Recipe | Callable[[Plan], Recipe], plan: Plan) -> Recipe:
    """Return the recipe; where it counts on Muon, and nobody has said what is inside, say so."""
    made = make_recipe(recipe, plan)
    if plan.inner_optimizer is None and made.inner.get("optimizer", {}).get("type") == "muon":
        _LOGGER.warning(
            'attach: %s counts on Muon as inner optimizer: say inner_optimizer="muon" if it is, or "adamw" if the loop '
            "has that or another",
            recipe if isinstance(recipe, str) else "the recipe",
        )
    return made


def _shared_config(method: Recipe, plan: Plan, options: Mapping[str, Any], state_dict: State | None) -> dict[str, str]:
    """Return what all workers must have alike, as they tell one another when they join."""
    parts = {name: getattr(method, name) for name in _PARTS}
    known = {name: str(part) for name, part in parts.items() if is_dataclass(part) or isinstance(part, str | dict)}
    if not plan.elastic:
        known["inner steps of the resumed state"] = str(state_dict["inner_steps"] if state_dict else 0)
    return known | {"steps": str(plan.steps), **{name: str(options[name]) for name in ("guard", "rollback")}}


def _override(recipe: Recipe, overrides: Overrides) -> Recipe:
    """Return the recipe with the schedule and the components that the caller has chosen."""
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    steps = {name: convert(given[name], kind, name) for name, kind in _OF_SCHEDULE.items() if name in given}
    parts = {name: given[name] for name in ("split",) if name in given}
    if "compressor" in given:
        parts["compressor"] = _component(COMPRESSORS, Compressor, given["compressor"])
    if "aggregation" in given:
        aggregation = complete(AGGREGATIONS, _as_spec(AGGREGATIONS, given["aggregation"]), "aggregation", ("codec",))
        parts["compressor"] = with_aggregation(parts.get("compressor", recipe.compressor), aggregation)
    if "gradient_compressor" in overrides:
        compressor = overrides["gradient_compressor"]
        parts["gradient_compressor"] = compressor and _component(COMPRESSORS, Compressor, compressor)
    if "merge" in given:
        parts["merge"] = _component(MERGES, Merge, given["merge"])
    if "optimizer" in given:
        parts["optimizer"] = _outer_optimizer(given["optimizer"])
    return replace(recipe, schedule=recipe.schedule and replace(recipe.schedule, **steps), **parts)


def _options(plan: Plan, overrides: Overrides) -> dict[str, Any]:
    """Return the arguments of the outer loop that are no parts of a recipe."""
    return {
        "steps": plan.steps if plan.elastic else None,
        "hash_every": overrides.get("hash_every", 10),
        "guard": _value(Guard, "guard", overrides.get("guard")) or Guard(),
        "rollback": _value(Rollback, "rollback", overrides.get("rollback")),
    }


def _value(kind: type[Value], name: str, given: Any) -> Value | None:
    """Return a part that is given as a value, or as what stands in a configuration file; None where none is given."""
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise UserError(f"{name}: expected a mapping or an instance of {kind.__name__}, got {given!r}")
    return kind(**read_arguments(kind, given, name))


def _component(registry: Registry, protocol: type, given: Any) -> Any:
    """Return a component that is given as a value, as a name, or as a spec."""
    return given if _is_instance(given, protocol) else build(registry, _as_spec(registry, given))


def _as_spec(registry: Registry, given: Any) -> Spec:
    """Return the spec of a component that is given as a name or as a spec."""
    if isinstance(given, str):
        return {"type": given}
    if isinstance(given, Mapping) and isinstance(given.get("type"), str):
        return dict(given)
    raise UserError(
        f"{registry.kind}: expected an instance, a name or {{type: name, ...}} with one of "
        f"{', '.join(registry.names())}, got {' '.join(repr(given).split())}"
    )


def _is_instance(value: Any, protocol: type) -> bool:
    """Return whether a value, not a class, has every member of a protocol."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in get_protocol_members(protocol))


def _outer_optimizer(given: Any) -> Spec | OuterOptimizer:
    """Return a complete spec, or the function that was given, once either has made an optimizer for a trial."""
    if isinstance(given, str | Mapping):
        given = complete(OUTER_OPTIMIZERS, _as_spec(OUTER_OPTIMIZERS, given), "optimizer", ("params",))
    elif not callable(given):
        raise UserError(
            "optimizer: expected a name, {type: name, ...} or a function that makes the optimizer of the anchors, "
            f"such as partial(torch.optim.SGD, lr=0.7), got {type(given).__name__}"
        )
    try_optimizer(given if callable(given) else factory(OUTER_OPTIMIZERS, given, "params"), "optimizer")
    result: Spec | OuterOptimizer = given
    return result
