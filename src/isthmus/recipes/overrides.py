"""The parts of a recipe that a caller of `attach` may replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import nn
from typing_extensions import get_protocol_members

from isthmus.compress import COMPRESSORS, Compressor
from isthmus.config import OUTER_OPTIMIZERS
from isthmus.core import Registry, UserError, nearest
from isthmus.outer import MERGES, Merge
from isthmus.outer.state import OuterOptimizer
from isthmus.recipes.base import Recipe
from isthmus.spec import Spec, build, complete, convert, factory


class Overrides(TypedDict, total=False):
    """Arguments of `attach` that replace parts of a recipe; what is left out is the recipe's own.

    A component is a value (`Float4("E3M0")`), a name ("float4"), or what stands in a configuration file
    ({"type": "float4", "format": "E3M0"}).

    Attributes:
        num_fragments: parts of the model that are synced one after the other.
        overlap_steps: inner steps between sending a fragment and finishing its sync.
        warm_start_steps: inner steps at the start of the run that are synced more often.
        warm_start_every: inner steps between two syncs of the warm start.
        compressor: how the mean of the workers' pseudo-gradients is taken in few bytes.
        merge: how a new anchor and the local parameters combine.
        optimizer: the outer optimizer; as a value, a function that makes one: `partial(SGD, lr=0.7)`.
        split: how the model is cut into fragments: "whole", "strided" or "balanced".
        hash_every: syncs between two comparisons of the anchors' hash over all workers.
        offload: "cpu" keeps anchors and other outer state in CPU memory between syncs.
    """

    num_fragments: int
    overlap_steps: int
    warm_start_steps: int
    warm_start_every: int
    compressor: Compressor | Spec | str
    merge: Merge | Spec | str
    optimizer: OuterOptimizer | Spec | str
    split: str
    hash_every: int
    offload: str | None


_OF_SCHEDULE = ("num_fragments", "overlap_steps", "warm_start_steps", "warm_start_every")


def check_names(overrides: Overrides) -> None:
    """Refuse arguments that `attach` does not have."""
    for name in overrides:
        if name not in Overrides.__annotations__:
            raise UserError(f"attach has no argument {name!r}: {nearest(name, list(Overrides.__annotations__))}")


def override(recipe: Recipe, overrides: Overrides) -> Recipe:
    """Return the recipe with the schedule and the components that the caller has chosen."""
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    steps = {name: convert(given[name], int, name) for name in _OF_SCHEDULE if name in given}
    parts = {name: given[name] for name in ("split",) if name in given}
    if "compressor" in given:
        parts["compressor"] = component(COMPRESSORS, Compressor, given["compressor"])
    if "merge" in given:
        parts["merge"] = component(MERGES, Merge, given["merge"])
    if "optimizer" in given:
        parts["optimizer"] = _outer_optimizer(given["optimizer"])
    return replace(recipe, schedule=recipe.schedule and replace(recipe.schedule, **steps), **parts)


def component(registry: Registry, protocol: type, given: Any) -> Any:
    """Return a component that is given as a value, as a name, or as a spec."""
    return given if is_instance(given, protocol) else build(registry, as_spec(registry, given))


def as_spec(registry: Registry, given: Any) -> Spec:
    """Return the spec of a component that is given as a name or as a spec."""
    if isinstance(given, str):
        return {"type": given}
    if isinstance(given, Mapping) and isinstance(given.get("type"), str):
        return dict(given)
    raise UserError(
        f"{registry.kind}: expected an instance, a name or {{type: name, ...}} with one of "
        f"{', '.join(registry.names())}, got {' '.join(repr(given).split())}"
    )


def is_instance(value: Any, protocol: type) -> bool:
    """Return whether a value, not a class, has every member of a protocol."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in get_protocol_members(protocol))


def _outer_optimizer(given: Any) -> Spec | OuterOptimizer:
    """Return a complete spec, or the function that was given, once either has made an optimizer for a trial."""
    if isinstance(given, str | Mapping):
        given = complete(OUTER_OPTIMIZERS, as_spec(OUTER_OPTIMIZERS, given), "optimizer", ("params",))
    elif not callable(given):
        raise UserError(
            "optimizer: expected a name, {type: name, ...} or a function that makes the optimizer of the anchors, "
            f"such as partial(torch.optim.SGD, lr=0.7), got {type(given).__name__}"
        )
    make = given if callable(given) else factory(OUTER_OPTIMIZERS, given, "params")
    try:
        make([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optimizer: {' '.join(str(error).split())}") from error
    result: Spec | OuterOptimizer = given
    return result
