"""From layers to one configuration: defaults < recipe < file < environment < command line."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import PositiveInt

from isthmus.compress import COMPRESSORS
from isthmus.config import DEFAULTS, OUTER_OPTIMIZERS, RunConfig, TrainConfig, parse
from isthmus.core import UserError
from isthmus.outer import MERGES
from isthmus.recipes.base import InnerOptimizer, Plan, Recipe, make_recipe, optimizer_family
from isthmus.spec import convert, describe
from isthmus.transport import TRANSPORTS

ENVIRONMENT_PREFIX = "ISTHMUS_"  # ISTHMUS_OUTER__SCHEDULE__LOCAL_STEPS=50
# what only an outer loop needs
_METHOD = (
    *("schedule", "compressor", "aggregation", "merge", "optimizer", "split", "gradient_compressor"),
    *("hash_every", "guard", "rollback", "offload"),
)

Layer = dict[str, Any]


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    workers: int | None = None,
    resume: bool = False,
) -> RunConfig:
    """Read and check a configuration.

    Args:
        path: a YAML file; None takes the defaults.
        overrides: such as "outer.schedule.local_steps=50"; values are YAML.
        workers: number of workers, above everything else. Without a word about it: as many as were started
            (WORLD_SIZE), or 1.
        resume: the run goes on: what its recipe derived when it began stays, also where `train.steps` is another now.

    Raises:
        UserError: one line that names what is wrong.
    """
    chosen: Layer = {}
    for layer in (_read_file(path) if path else {}, _read_environment(), _read_overrides(overrides)):
        chosen = merge(chosen, layer)
    if workers is not None:
        chosen = merge(chosen, {"train": {"workers": workers}})
    base = merge(DEFAULTS, {"train": {"workers": os.environ.get("WORLD_SIZE", 1)}})
    asked = merge(base, chosen)
    for section, values in asked.items():
        if not isinstance(values, Mapping):
            raise UserError(f"{section}: expected keys and values, got {values!r}")
    name = convert(asked["outer"]["recipe"], str, "outer.recipe")
    recipe = make_recipe(name, _plan(asked, chosen))
    derived = _layer(name, recipe)
    if resume:
        run_dir = asked["train"].get("run_dir", TrainConfig.model_fields["run_dir"].default)
        derived = _derived_at_begin(Path(str(run_dir)), name, derived) or derived
    values = merge(merge(base, derived), chosen)
    if recipe.schedule is None:
        values["outer"] = {key: value for key, value in values["outer"].items() if key not in _METHOD}
    return parse(values)


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Layer:
    """Lay `high` over `low`: a mapping refines the one below it, unless it names a `type`, as a new component does."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and "type" not in value:
            value = merge(below, value)
        merged[key] = value
    return merged


def _layer(name: str, recipe: Recipe) -> Layer:
    """Return what a recipe decides, as a layer of the configuration."""
    optimizer = recipe.optimizer
    if isinstance(optimizer, partial) and isinstance(optimizer.func, type) and not optimizer.args:
        optimizer = {"type": OUTER_OPTIMIZERS.name_of(optimizer.func), **optimizer.keywords}
    if not isinstance(optimizer, dict):
        raise UserError(
            f"recipe {name!r}: in a configuration its optimizer is {{type: name, ...}} or partial(Class, ...)"
        )
    outer = {
        "schedule": recipe.schedule and asdict(recipe.schedule),
        "compressor": describe(COMPRESSORS, recipe.compressor),
        "merge": describe(MERGES, recipe.merge),
        "optimizer": optimizer,
        "split": recipe.split,
        "gradient_compressor": recipe.gradient_compressor and describe(COMPRESSORS, recipe.gradient_compressor),
    }
    return {"outer": outer, "inner": recipe.inner}


def _derived_at_begin(run_dir: Path, recipe: str, derived: Layer) -> Layer:
    """Return what the same recipe derived when the run in this folder began; nothing where no such run is there.

    What the recipes of its version did not know yet is None: they went without.
    """
    path = run_dir / "config.yaml"
    begun = _read_file(path) if path.exists() else {}
    if not isinstance(begun.get("outer"), Mapping) or begun["outer"].get("recipe") != recipe:
        return {}
    sections = {name: begun.get(name, {}) for name in derived}
    return {name: {key: section.get(key) for key in derived[name]} for name, section in sections.items()}


def _plan(asked: Layer, chosen: Layer) -> Plan:
    train, schedule = asked["train"], asked["outer"].get("schedule")
    local_steps = schedule.get("local_steps") if isinstance(schedule, Mapping) else None
    elastic = _is_elastic(asked["outer"].get("transport"))
    return Plan(
        num_workers=convert(train["workers"], PositiveInt, "train.workers"),
        steps=convert(train["steps"], PositiveInt, "train.steps"),
        local_steps=convert(local_steps, PositiveInt | None, "outer.schedule.local_steps"),
        elastic=elastic,
        averages_gradients=not elastic,
        inner_optimizer=_inner_optimizer(chosen),
    )


def _inner_optimizer(chosen: Layer) -> InnerOptimizer | None:
    """Return whose rules hold where the user has chosen the inner optimizer; None: the recipe's own is inside."""
    optimizer = chosen.get("inner", {}).get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    return None if kind is None else optimizer_family(str(kind))


def _is_elastic(transport: Any) -> bool:
    """Return whether workers may come and go; `parse` tells later what is wrong with the transport."""
    try:
        return bool(TRANSPORTS.get(transport["type"]).limits.elastic)
    except (KeyError, TypeError, UserError):
        return False


def _read_file(path: str | os.PathLike[str]) -> Layer:
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{str(path)!r} is not text in UTF-8 (UTF-16, perhaps): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read the configuration {str(path)!r}: {error.strerror}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{str(path)!r} must hold sections such as model and train, got {values!r}")
    return values


def _read_environment() -> Layer:
    layer: Layer = {}
    for name, text in os.environ.items():
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _insert(layer, keys, text, name)
    return layer


def _read_overrides(overrides: Iterable[str]) -> Layer:
    layer: Layer = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise UserError(f"cannot read {override!r}: write section.key=value, such as train.steps=100")
        _insert(layer, path.strip().split("."), text, override)
    return layer


def _insert(layer: Layer, keys: list[str], text: str, source: str) -> None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value of {source!r} is not YAML: {' '.join(str(error).split())}") from None
    for key in keys[:-1]:
        below = layer.get(key)
        layer[key] = below if isinstance(below, dict) else {}
        layer = layer[key]
    layer[keys[-1]] = value
