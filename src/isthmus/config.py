"""The schema of a run: sections as pydantic models, components as specs.

A *spec* is `{type: name, **arguments}`: a registered component (or an import path "package.module:Class") and its
constructor's arguments; a component inside a component is a spec again. A checked spec holds every argument, so
that a resolved configuration says everything and changes with no default.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic import NonNegativeInt as Count
from torch import nn

from isthmus.compress import COMPRESSORS
from isthmus.core import SPLITS, Registry, SyncSchedule, UserError, nearest
from isthmus.data import DATA
from isthmus.inner import INNER_OPTIMIZERS, LR_SCHEDULES
from isthmus.models import MODELS
from isthmus.outer import MERGES
from isthmus.parallel import Mesh
from isthmus.transport import TRANSPORTS
from isthmus.transport.rendezvous import first_line

OUTER_OPTIMIZERS = Registry(
    "outer optimizer",
    {
        "sgd": "torch.optim:SGD",
        "adam": "torch.optim:Adam",
        "adamw": "torch.optim:AdamW",
    },
)

DEFAULTS = {  # what a configuration need not say, below the recipe and beside the defaults of fields
    "model": {"type": "gpt_neox"},
    "data": {"type": "text"},
    "inner": {"optimizer": {"type": "adamw"}, "lr_schedule": {"type": "cosine"}},
    "outer": {"recipe": "diloco", "transport": {"type": "torch_dist"}},
    "train": {"steps": 1000},
}

Spec = dict[str, Any]


def build(registry: Registry, spec: Mapping[str, Any], **given: Any) -> Any:
    """The component that a spec describes; `given` are arguments that come from code, not from the configuration."""
    component, arguments = _read(registry, spec, registry.kind, given)
    return component(**arguments, **given)


def factory(registry: Registry, spec: Mapping[str, Any], *given: str) -> partial[Any]:
    """Like `build`, for components that take further arguments (named in `given`) each time they are made."""
    component, arguments = _read(registry, spec, registry.kind, given)
    return partial(component, **arguments)


def describe(registry: Registry, value: Any) -> Spec:
    """The spec of a component that is a dataclass: the inverse of `build`."""
    described = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return {"type": registry.name_of(type(value))} | {
        name: describe(registry, item) if is_dataclass(item) else item for name, item in described.items()
    }


def check(registry: Registry, spec: Any, path: str, given: tuple[str, ...] = ()) -> Spec:
    """The complete, plain form of a spec: every argument, converted to its type.

    Raises:
        UserError: names the argument by its path ("outer.compressor.block") and says what it should be.
    """
    component, arguments = _read(registry, spec, path, given)
    if is_dataclass(component):  # a value, which refuses combinations that make no sense
        return describe(registry, component(**arguments)) | {"type": spec["type"]}
    parameters = _parameters(component, given)
    return {"type": spec["type"]} | {name: arguments.get(name, p.default) for name, p in parameters.items()}


def _read(registry: Registry, spec: Any, path: str, given: Iterable[str] = ()) -> tuple[Any, Spec]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("type"), str):
        raise UserError(f"{path}: expected {{type: name, ...}} with one of {', '.join(registry.names())}, got {spec!r}")
    component = registry.get(spec["type"])
    values = {name: value for name, value in spec.items() if name != "type"}
    return component, _arguments(component, values, path, registry, given)


def _arguments(
    component: Any,
    values: Mapping[str, Any],
    path: str,
    registry: Registry | None = None,
    given: Iterable[str] = (),
) -> Spec:
    """`values` as arguments of a class: all known, none missing, converted to their types."""
    parameters = _parameters(component, given)
    arguments = {}
    for name, value in values.items():
        if name not in parameters:
            raise UserError(f"{path}.{name}: unknown key, {nearest(str(name), list(parameters))}")
        arguments[name] = _argument(value, parameters[name].annotation, f"{path}.{name}", registry)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{path}.{name} is missing: it has no default")
    return arguments


def _parameters(component: Any, given: Iterable[str]) -> dict[str, inspect.Parameter]:
    """Constructor arguments that a configuration may set, with evaluated annotations."""
    hints = typing.get_type_hints(component if is_dataclass(component) else component.__init__)
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(component).parameters.items()
        if name not in given and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _argument(value: Any, annotation: Any, path: str, registry: Registry | None) -> Any:
    """A component from a nested spec; anything else converted."""
    is_plain = typing.get_origin(annotation) is dict
    if registry and isinstance(value, Mapping) and "type" in value and not is_plain:
        component, arguments = _read(registry, value, path)
        return component(**arguments)
    if getattr(annotation, "_is_protocol", False):
        raise UserError(f"{path}: expected {{type: name, ...}}, got {value!r}")
    return convert(value, annotation, path)


def convert(value: Any, annotation: Any, path: str) -> Any:
    """`value` as a type, leniently ("3" is an integer).

    Raises:
        UserError: it cannot be; the line names `path`.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise UserError(_sentence(path, error.errors()[0])) from None


def _sentence(path: str, error: Any) -> str:
    message = error["msg"].replace("Input should be", "should be").replace("Value error, ", "")
    return f"{path}: {message}, got {error['input']!r}"


def _component(registry: Registry, path: str, *given: str) -> BeforeValidator:
    """Says that a field holds a spec of this registry."""
    return BeforeValidator(lambda spec: check(registry, spec, path, given))


def _plain(component: type, path: str, example: str) -> BeforeValidator:
    """Says that a field holds a value of this class, which has no other name than the field."""

    def read(value: Any) -> Any:
        if isinstance(value, component):
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: expected {{{example}: ..., ...}}, got {value!r}")
        return component(**_arguments(component, value, path))

    return BeforeValidator(read)


def _read_micro_batch_size(value: Any) -> int | str | None:
    if value is None or value == "auto":
        return value
    try:
        size: int = convert(value, PositiveInt, "")
    except UserError:
        raise UserError(f"inner.micro_batch_size: should be a number, at least 1, or auto, got {value!r}") from None
    return size


def _read_outer_optimizer(spec: Any) -> Spec:
    complete = check(OUTER_OPTIMIZERS, spec, "outer.optimizer", ("params",))
    try:
        factory(OUTER_OPTIMIZERS, complete, "params")([nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError, RuntimeError) as error:  # values that make no sense, or not together
        raise UserError(f"outer.optimizer: {first_line(error)}") from None
    return complete


def _known_split(name: str) -> str:
    SPLITS.get(name)
    return name


_GIVEN_TO_TRANSPORTS = ("identity", "expected_workers", "ranks_per_worker", "rider", "say")


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InnerConfig(Section):
    """One ordinary training step, and its data order."""

    optimizer: Annotated[Spec, _component(INNER_OPTIMIZERS, "inner.optimizer")]
    lr_schedule: Annotated[Spec, _component(LR_SCHEDULES, "inner.lr_schedule")]
    batch_size: PositiveInt = 8  # sequences a worker and step
    # sequences at once, a matter of each worker; None: the whole batch; auto: what turns out to be the fastest
    micro_batch_size: Annotated[int | Literal["auto"] | None, BeforeValidator(_read_micro_batch_size)] = None
    clip_norm: float | None = 1.0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False


class OuterConfig(Section):
    """The method. Without a schedule there is no outer loop: gradients are averaged at every step (`ddp`)."""

    recipe: str
    transport: Annotated[Spec, _component(TRANSPORTS, "outer.transport", *_GIVEN_TO_TRANSPORTS)]
    schedule: Annotated[SyncSchedule, _plain(SyncSchedule, "outer.schedule", "local_steps")] | None = None
    compressor: Annotated[Spec, _component(COMPRESSORS, "outer.compressor")] | None = None
    merge: Annotated[Spec, _component(MERGES, "outer.merge")] | None = None
    optimizer: Annotated[Spec, BeforeValidator(_read_outer_optimizer)] | None = None
    split: Annotated[str, AfterValidator(_known_split)] = "whole"
    hash_every: Count = 10  # syncs between two comparisons of the anchors' hash


class TrainConfig(Section):
    """How long, how often, where."""

    steps: PositiveInt  # inner steps of every worker
    workers: PositiveInt = 1
    eval_every: Count = 100  # 0: only at the end
    eval_batches: PositiveInt = 8
    checkpoint_every: Count = 100  # 0: only when stopped
    keep_checkpoints: PositiveInt = 3
    log_every: PositiveInt = 10
    seed: Count = 0
    run_dir: str = "runs/last"


class RunConfig(Section):
    """Everything that a run depends on."""

    model: Annotated[Spec, _component(MODELS, "model")]
    data: Annotated[Spec, _component(DATA, "data")]
    inner: InnerConfig
    outer: OuterConfig
    train: TrainConfig
    mesh: Annotated[Mesh, _plain(Mesh, "mesh", "shard")] = Mesh()  # of the ranks of a worker

    @model_validator(mode="after")
    def _mesh_fits(self) -> Self:
        """What a worker of several ranks cannot do."""
        mesh, inner, transport = self.mesh, self.inner, self.outer.transport["type"]
        if mesh.num_ranks == 1:
            return self
        if TRANSPORTS.get(transport).limits.elastic:
            raise UserError(f"mesh: with outer.transport {transport} a worker has one rank: use torch_dist")
        if self.outer.schedule is None:
            raise UserError(f"mesh: {self.outer.recipe} is for workers of one rank: use a recipe with an outer loop")
        if inner.micro_batch_size == "auto":
            raise UserError("inner.micro_batch_size: auto is for workers of one rank: set a number")
        if inner.batch_size % mesh.shard:
            raise UserError(f"inner.batch_size: {inner.batch_size} is no multiple of the {mesh.shard} shards: use one")
        if inner.compile and mesh.pp > 1:
            raise UserError("inner.compile: pipeline stages are not compiled: set it to false")
        return self


def parse(values: Mapping[str, Any]) -> RunConfig:
    """Validate a nested mapping.

    Raises:
        UserError: one line, naming the key by its path.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"{path} is missing: it has no default") from None
        if first["type"] == "extra_forbidden":
            known = list(_section(first["loc"][:-1]).model_fields)
            raise UserError(f"{path}: unknown key, {nearest(str(first['loc'][-1]), known)}") from None
        raise UserError(_sentence(path, first)) from None


def _section(path: tuple[int | str, ...]) -> type[Section]:
    section: Any = RunConfig
    for name in path:
        section = section.model_fields[name].annotation
    return section


def dump(config: RunConfig) -> dict[str, Any]:
    """The nested plain mapping that `parse` reads back."""
    return config.model_dump(mode="json")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: {"outer.schedule.local_steps": 100, ...}; lists stay values."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result
