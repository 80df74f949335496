"""Building the parts of one worker from a configuration."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.config import (
    OUTER_OPTIMIZERS,
    RunConfig,
    TrackConfig,
    build_compressor,
    build_gradient_compressor,
    dump,
    flat,
)
from isthmus.core import SPLITS, UserError
from isthmus.data import DATA, DataSet, DataSpec
from isthmus.data.base import check_source
from isthmus.inner import INNER_OPTIMIZERS, LR_SCHEDULES, Adversarial, AdversarialStep, SupervisedStep
from isthmus.inner.adversarial import is_adversarial
from isthmus.inner.pipelined import PipelinedStep
from isthmus.models import MODELS, ModelSpec
from isthmus.models.stages import split_into_stages
from isthmus.outer import MERGES, Offload
from isthmus.parallel import apply_fsdp, apply_tp, tensor_plan
from isthmus.parallel.pipeline import LocalStages
from isthmus.spec import build, factory
from isthmus.train.checkpoint_files import PARAMETER, RunIdentity
from isthmus.train.data_parallel import DataParallel
from isthmus.train.method import Method, OuterLoopMethod
from isthmus.transport import TRANSPORTS, Transport
from isthmus.transport.configured import ConfiguredTransport

SERVED_OPTIONS = "SERVED_OPTIONS"  # environment variable of a launcher's workers: more of `outer.transport`, as JSON

# what may differ between workers, with the transport's own private options
_TRACK = [f"track.{name}" for name in TrackConfig.model_fields]
# of what workers share: what may be another when a run goes on
_CHANGEABLE = ("outer.transport.", "outer.guard.", "outer.aggregation.", "outer.rollback")
_OWN = ("train.run_dir", "inner.micro_batch_size", "inner.compile", "outer.offload", "data.max_bad_samples", *_TRACK)


def open_data(config: RunConfig, model: ModelSpec) -> DataSet:
    """Open the data, and check that they fit the model."""
    data, options = _data_for(config, model)
    data_set: DataSet = data.open(**options)
    _check_sizes(model, data_set.sizes)
    return data_set


def check_data(config: RunConfig, model: ModelSpec) -> None:
    """Refuse data that are not there or do not fit the model, as far as that shows without reading them."""
    data, _ = _data_for(config, model)
    check_source(data)
    _check_sizes(model, getattr(data, "known_sizes", {}))


def _data_for(config: RunConfig, model: ModelSpec) -> tuple[DataSpec, dict[str, Any]]:
    """Return the data's description, and what its `open` wants to know of the model."""
    data, kind = build(DATA, config.data), config.data["type"]
    parameters = inspect.signature(data.open).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty or hasattr(model, each.name)]
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise UserError(f"data: {kind} is for models with {missing[0]}, {config.model['type']} has none: choose others")
    return data, {name: getattr(model, name) for name in needed}


def _check_sizes(model: ModelSpec, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        known = getattr(model, name, size)
        if size > known:
            raise UserError(f"model.{name} is {known}, the data has {size}: raise it")


def build_model_spec(config: RunConfig) -> ModelSpec:
    """Return the description of the model."""
    spec: ModelSpec = build(MODELS, config.model)
    return spec


def transport_class(config: RunConfig) -> type[ConfiguredTransport]:
    """Return the class of transports that the configuration names, and that launcher and doctor can ask."""
    name = config.outer.transport["type"]
    component: type[ConfiguredTransport] = TRANSPORTS.get(name)
    if not issubclass(component, ConfiguredTransport):
        base = f"{ConfiguredTransport.__module__}.{ConfiguredTransport.__name__}"
        raise UserError(f"outer.transport.type {name}: make it a subclass of {base}")
    return component


def is_elastic(config: RunConfig) -> bool:
    """Return whether workers may come and go."""
    return transport_class(config).limits.elastic


def build_transport(config: RunConfig, **more: Any) -> Transport:
    """Return the transport; when it is joined it compares the workers' configurations, or `shared_config` instead."""
    more.setdefault("shared_config", {key: str(value) for key, value in shared_keys(config).items()})
    if config.mesh.num_ranks > 1:
        more["ranks_per_worker"] = config.mesh.num_ranks
    spec = config.outer.transport | json.loads(os.environ.get(SERVED_OPTIONS, "{}"))
    transport: Transport = build(TRANSPORTS, spec, expected_workers=config.train.workers, **more)
    return transport


def shard_model(
    config: RunConfig, spec: ModelSpec, model: nn.Module, device_mesh: DeviceMesh | None
) -> LocalStages | None:
    """Leave of a whole model what this rank of a worker trains, in place; return its stages if it is a pipeline."""
    mesh = config.mesh
    if device_mesh is None:
        return None
    plan = tensor_plan(spec, mesh.tp)
    if mesh.pp == 1:
        parts, stages = [model], None
    else:
        stages = split_into_stages(spec, model, device_mesh.get_local_rank("pp"), mesh.pp, mesh.stages_per_rank)
        parts = list(stages.modules.values())
    for part in parts:
        apply_tp(part, plan, device_mesh)
        apply_fsdp(part, mesh, device_mesh)
    return stages


def build_method(config: RunConfig, model: nn.Module, **more: Any) -> Method:
    """Join the other workers with the outer loop or, without a schedule, with DDP; `more` is for the transport."""
    outer, transport = config.outer, build_transport(config, **more)
    if outer.schedule is None:
        return DataParallel(model, transport, outer.transport["sync_budget_seconds"])
    return build_outer_loop(config, model, transport)


def build_outer_loop(config: RunConfig, model: nn.Module, transport: Transport) -> OuterLoopMethod:
    """Join the other workers with the outer loop of a configuration that has one."""
    outer = config.outer
    assert outer.schedule is not None
    assert outer.merge is not None
    assert outer.optimizer is not None
    return OuterLoopMethod(
        SPLITS.get(outer.split)(model, outer.schedule.num_fragments),
        outer.schedule,
        build_compressor(outer),
        transport,
        factory(OUTER_OPTIMIZERS, outer.optimizer, "params"),
        build(MERGES, outer.merge),
        outer.hash_every,
        config.train.steps,
        outer.guard,
        Offload(outer.offload),
        outer.rollback,
        build_gradient_compressor(outer),
    )


def check_inner_step(config: RunConfig, model: nn.Module) -> None:
    """Refuse an inner step that does not fit the model, or its outline."""
    optimizer = build(INNER_OPTIMIZERS, config.inner.optimizer)
    if isinstance(optimizer, Adversarial):
        optimizer.check_model(model)
        if config.inner.compile:
            raise UserError("inner.compile: adversarial steps are not compiled: set it to false")
    elif is_adversarial(model):
        kind = config.inner.optimizer["type"]
        raise UserError(f"inner.optimizer: {kind} trains one network, the model has two: use {{type: adversarial}}")


def build_inner_step(
    config: RunConfig,
    model: nn.Module,
    device_mesh: DeviceMesh | None = None,
    stages: LocalStages | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    average_gradients: Callable[[list[nn.Parameter]], None] | None = None,
) -> SupervisedStep | AdversarialStep:
    """Return the inner step of `model`, which is all of this rank, or of the stages that a pipeline cuts it into.

    `wrap` puts what averages gradients in the backward pass around what has a loss; `average_gradients` does it to
    the gradients of some parameters after that pass.
    """
    inner, spec = config.inner, build(INNER_OPTIMIZERS, config.inner.optimizer)
    check_inner_step(config, model)
    optimizer = spec.build(model)
    lr_schedule = build(LR_SCHEDULES, inner.lr_schedule).over(config.train.steps)
    options: dict[str, Any] = {"clip_norm": inner.clip_norm, "precision": inner.precision}
    options["average_gradients"] = average_gradients
    options["micro_batch_size"] = None if inner.micro_batch_size == "auto" else inner.micro_batch_size
    if isinstance(spec, Adversarial):
        return AdversarialStep(
            model, optimizer, lr_schedule, discriminator_steps=spec.discriminator_steps, wrap=wrap, **options
        )
    if stages is not None and device_mesh is not None:
        return PipelinedStep(model, stages, device_mesh, optimizer, lr_schedule, **options)
    return SupervisedStep(
        wrap(model), optimizer, lr_schedule, **options, compile=inner.compile, device_mesh=device_mesh
    )


def shared_keys(config: RunConfig) -> dict[str, Any]:
    """Return the flat configuration that all workers must share."""
    private = {*_OWN, *(f"outer.transport.{name}" for name in transport_class(config).PRIVATE_OPTIONS)}
    return {key: value for key, value in flat(dump(config)).items() if key not in private}


def config_hash(config: RunConfig) -> str:
    """Return 16 hexadecimal digits that differ when anything that workers share differs."""
    return hashlib.sha256(json.dumps(shared_keys(config), sort_keys=True).encode()).hexdigest()[:16]


def fixed_settings(config: RunConfig) -> RunIdentity:
    """Return the settings that no run can change on its way: method, model, and what positions are positions in."""
    kept = ("model.", "data.", "outer.", "train.workers", "train.seed", "inner.optimizer.type", "inner.batch_size")
    shared = {key: value for key, value in shared_keys(config).items() if key.startswith(kept)}
    return {key: value for key, value in shared.items() if not key.startswith(_CHANGEABLE)}


def run_identity(config: RunConfig, model: nn.Module) -> RunIdentity:
    """Return what must be equal for a checkpoint to fit: the fixed settings and the whole model's parameters."""
    shapes = {f"{PARAMETER}{name}": f"{list(p.shape)} {p.dtype}" for name, p in model.named_parameters()}
    return fixed_settings(config) | shapes


def choose_device() -> torch.device:
    """Return this rank's GPU if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
