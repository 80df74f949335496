"""The schema of a run: sections as pydantic models, components as specs."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from torch import nn

from isthmus.compress import AGGREGATIONS, COMPRESSORS, Compressor
from isthmus.compress.robust import aggregate
from isthmus.core import SPLITS, Registry, SyncSchedule, UserError, nearest
from isthmus.data import DATA, current_spec
from isthmus.inner import INNER_OPTIMIZERS, LR_SCHEDULES
from isthmus.models import MODELS
from isthmus.models.published_sizes import with_size
from isthmus.outer import MERGES, Guard, Offload, Rollback
from isthmus.parallel import ParallelDims
from isthmus.spec import Spec, build, complete, convert, factory, read_arguments, sentence
from isthmus.transport import TRANSPORTS
from isthmus.transport.base import readable_message

OUTER_OPTIMIZERS = Registry(
    "outer optimizer",
    {"sgd": "torch.optim:SGD", "adam": "torch.optim:Adam", "adamw": "torch.optim:AdamW"},
    methods=("step", "state_dict"),
)

DEFAULTS = {  # what a configuration need not say, below the recipe and beside the defaults of fields
    "model": {"type": "gpt_neox"},
    "data": {"type": "text"},
    "inner": {"optimizer": {"type": "adamw"}, "lr_schedule": {"type": "cosine"}},
    "outer": {"recipe": "diloco", "transport": {"type": "torch_dist"}},
    "train": {"steps": 1000},
}


def _component(registry: Registry, path: str, *given: str) -> BeforeValidator:
    """Return the validator of a field that holds a spec of this registry."""
    return BeforeValidator(lambda spec: complete(registry, spec, path, given))


def _read_transport(spec: Any) -> Spec:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if kind in ("gloo", "nccl"):
        raise UserError(f"outer.transport.type: {kind} is a backend of torch_dist: set outer.transport.backend={kind}")
    return complete(TRANSPORTS, spec, "outer.transport", _GIVEN_TO_TRANSPORTS)


def _plain(component: type, path: str, example: str) -> BeforeValidator:
    """Return the validator of a field that holds a value of this class, which has no other name than the field."""

    def read(value: Any) -> Any:
        if isinstance(value, component):
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: expected {{{example}: ..., ...}}, got {value!r}")
        return component(**read_arguments(component, value, path))

    return BeforeValidator(read)


def _read_aggregation(spec: Any) -> Spec:
    spec = {"type": spec} if isinstance(spec, str) else spec
    return complete(AGGREGATIONS, spec, "outer.aggregation", ("codec",))


def _read_micro_batch_size(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    try:
        return convert(value, PositiveInt, "")
    except UserError:
        raise UserError(f"inner.micro_batch_size: should be a number, at least 1, or auto, got {value!r}") from None


def _read_outer_optimizer(spec: Any) -> Spec:
    whole = complete(OUTER_OPTIMIZERS, spec, "outer.optimizer", ("params",))
    make = factory(OUTER_OPTIMIZERS, whole, "params")
    if isinstance(make.func, type):  # torch's own `add_param_group` imports its compiler, which takes a second
        quick = type(make.func.__name__, (make.func,), {"add_param_group": lambda self, group: None})
        make = partial(quick, **make.keywords)
    try_optimizer(make, "outer.optimizer")
    return whole


def try_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], path: str) -> None:
    """Make an optimizer once, to refuse values that make no sense, or not together."""
    try:
        make([nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{path}: {readable_message(error)}") from None


def _known_split(name: str) -> str:
    SPLITS.get(name)
    return name


_GIVEN_TO_TRANSPORTS = ("shared_config", "expected_workers", "ranks_per_worker", "replicated_state", "resumes")


class Section(BaseModel):
    """A section of the configuration."""

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
    compile: bool = False  # by torch, a matter of each worker


class OuterConfig(Section):
    """The method. Without a schedule there is no outer loop: gradients are averaged at every step (`ddp`)."""

    recipe: str
    transport: Annotated[Spec, BeforeValidator(_read_transport)]
    schedule: Annotated[SyncSchedule, _plain(SyncSchedule, "outer.schedule", "local_steps")] | None = None
    compressor: Annotated[Spec, _component(COMPRESSORS, "outer.compressor")] | None = None
    # how the workers' messages become one: their mean, or one that bad ones move only so far
    aggregation: Annotated[Spec, BeforeValidator(_read_aggregation)] = {"type": "mean"}
    merge: Annotated[Spec, _component(MERGES, "outer.merge")] | None = None
    optimizer: Annotated[Spec, BeforeValidator(_read_outer_optimizer)] | None = None
    split: Annotated[str, AfterValidator(_known_split)] = "whole"
    # how gradients are averaged at every step of the warm start; None: each worker steps by its own
    gradient_compressor: Annotated[Spec, _component(COMPRESSORS, "outer.gradient_compressor")] | None = None
    hash_every: NonNegativeInt = 10  # rounds between two comparisons of a fragment's hash
    guard: Annotated[Guard, _plain(Guard, "outer.guard", "max_norm_factor")] = Guard()  # who is left out of a sync
    # when all workers go back to the anchors of the last good evaluation; None: never
    rollback: Annotated[Rollback, _plain(Rollback, "outer.rollback", "max_loss_factor")] | None = None
    # where outer state stays between syncs; None: on the model's device
    offload: Annotated[str | None, AfterValidator(lambda name: Offload(name).device)] = None


def build_compressor(outer: OuterConfig) -> Compressor:
    """Return the compressor of a configuration with an outer loop, which takes the mean that was chosen."""
    assert outer.compressor is not None
    return with_aggregation(build(COMPRESSORS, outer.compressor), outer.aggregation)


def build_gradient_compressor(outer: OuterConfig) -> Compressor | None:
    """Return what takes the mean of gradients in the warm start, which is the mean that was chosen; None: nothing."""
    if outer.gradient_compressor is None:
        return None
    return with_aggregation(build(COMPRESSORS, outer.gradient_compressor), outer.aggregation)


def with_aggregation(compressor: Compressor, spec: Spec) -> Compressor:
    """Return the compressor with the mean that a spec describes in the place of its own."""
    if spec["type"] == "mean":
        return compressor
    return aggregate(compressor, factory(AGGREGATIONS, spec, "codec"))


class TrainConfig(Section):
    """How long a run trains, what it does how often, and where its files go."""

    steps: PositiveInt  # inner steps of every worker
    workers: PositiveInt = 1
    eval_every: NonNegativeInt = 100  # 0: only at the end
    eval_batches: PositiveInt = 8
    checkpoint_every: NonNegativeInt = 100  # 0: only when stopped
    keep_checkpoints: PositiveInt = 3
    log_every: PositiveInt = 10
    seed: NonNegativeInt = 0
    run_dir: str = "runs/last"


class TrackConfig(Section):
    """The places besides its metrics files where a run can be watched; each worker may have its own."""

    tensorboard: bool = False  # event files, in the run's folder
    wandb: str | None = None  # a project of Weights & Biases
    prometheus_port: Annotated[int | None, Field(ge=1, le=65535)] = None  # plus k at the k-th worker on a machine


class RunConfig(Section):
    """Everything that a run depends on."""

    model: Annotated[Spec, BeforeValidator(lambda spec: complete(MODELS, with_size(spec), "model"))]
    data: Annotated[Spec, BeforeValidator(lambda spec: complete(DATA, current_spec(spec), "data"))]
    inner: InnerConfig
    outer: OuterConfig
    train: TrainConfig
    mesh: Annotated[ParallelDims, _plain(ParallelDims, "mesh", "shard")] = ParallelDims()  # of the ranks of a worker
    track: TrackConfig = TrackConfig()

    @model_validator(mode="after")
    def _rollback_fits(self) -> Self:
        if self.outer.rollback is not None and not self.train.eval_every:
            raise UserError("outer.rollback goes by evaluations: set train.eval_every above 0")
        return self

    @model_validator(mode="after")
    def _mesh_fits(self) -> Self:
        """Refuse what a worker of several ranks cannot do."""
        mesh, inner = self.mesh, self.inner
        if mesh.num_ranks == 1:
            return self
        if self.outer.schedule is None:
            raise UserError(f"mesh: {self.outer.recipe} is for workers of one rank: use a recipe with an outer loop")
        if inner.optimizer["type"] == "adversarial":
            raise UserError("mesh: adversarial steps are for workers of one rank: leave mesh out")
        if inner.micro_batch_size == "auto":
            raise UserError("inner.micro_batch_size: auto is for workers of one rank: set a number")
        if inner.batch_size % mesh.shard:
            raise UserError(f"inner.batch_size: {inner.batch_size} is no multiple of the {mesh.shard} shards: use one")
        if inner.compile and mesh.pp > 1:
            raise UserError("inner.compile: pipeline stages are not compiled: set it to false")
        return self


def parse(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a nested mapping describes.

    Raises:
        UserError: one line, naming the key by its path.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"{path} is missing: it has no default") from None
        if first["type"] == "extra_forbidden":
            known = list(_section(first["loc"][:-1]).model_fields)
            raise UserError(f"{path}: unknown key, {nearest(str(first['loc'][-1]), known)}") from None
        raise UserError(sentence(path, first)) from None
    for path, value in flat(config.model_dump()).items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise UserError(f"{path}: should be a finite number, got {value}")
    return config


def _section(path: tuple[int | str, ...]) -> type[Section]:
    section: type[Section] = RunConfig
    for name in path:
        section = section.model_fields[str(name)].annotation  # type: ignore[assignment]  # sections hold sections
    return section


def dump(config: RunConfig) -> dict[str, Any]:
    """Return the nested plain mapping that `parse` reads back."""
    return config.model_dump(mode="json")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one: {"outer.schedule.local_steps": 100, ...}; lists stay values."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result
