"""The checks and figures of a run before its workers start: `show` and `launch` tell them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isthmus.compress import AGGREGATIONS, COMPRESSORS
from isthmus.config import OUTER_OPTIMIZERS, RunConfig, build_compressor, build_gradient_compressor
from isthmus.core import SPLITS, Registry
from isthmus.data import DATA
from isthmus.inner import INNER_OPTIMIZERS, LR_SCHEDULES
from isthmus.models import MODELS, outline
from isthmus.models.stages import check_stages
from isthmus.outer import MERGES
from isthmus.outer.gradients import check_gradient_compressor
from isthmus.parallel import tensor_plan
from isthmus.parallel.pipeline import count_micro_batches
from isthmus.recipes import RECIPES
from isthmus.spec import build
from isthmus.train.assemble import build_model_spec, check_data, check_inner_step, is_elastic, transport_class
from isthmus.transport import TRANSPORTS


def check_run(config: RunConfig, with_data: bool = True) -> None:
    """Refuse a run that cannot begin: nothing is built, read or joined that takes more than a moment.

    Data are looked for on this machine, if at all.
    """
    transport_class(config)
    spec = build_model_spec(config)
    if with_data:
        check_data(config, spec)
    sketch = outline(spec)
    check_inner_step(config, sketch)
    build(LR_SCHEDULES, config.inner.lr_schedule).over(config.train.steps)
    mesh, inner, outer = config.mesh, config.inner, config.outer
    tensor_plan(spec, mesh.tp)
    if mesh.pp > 1 and inner.micro_batch_size != "auto":
        check_stages(spec, sketch, mesh.pp * mesh.stages_per_rank)
        size = inner.batch_size // mesh.shard
        count_micro_batches(size, inner.micro_batch_size, mesh.pp, mesh.stages_per_rank)
    if outer.schedule is not None and outer.compressor is not None and outer.merge is not None:
        build_compressor(outer)
        check_gradient_compressor(build_gradient_compressor(outer), outer.schedule, is_elastic(config))
        build(MERGES, outer.merge)
        if mesh.pp == 1:  # else each stage is split by itself
            SPLITS.get(outer.split)(sketch, outer.schedule.num_fragments)


def import_paths(config: RunConfig) -> dict[str, str]:
    """Return where each part's code is: {"outer.compressor": "isthmus.compress.float4:Float4", ...}."""
    inner, outer = config.inner, config.outer
    parts: dict[str, tuple[Registry, Any]] = {
        "model": (MODELS, config.model),
        "data": (DATA, config.data),
        "inner.optimizer": (INNER_OPTIMIZERS, inner.optimizer),
        "inner.lr_schedule": (LR_SCHEDULES, inner.lr_schedule),
        "outer.recipe": (RECIPES, {"type": outer.recipe}),
        "outer.transport": (TRANSPORTS, outer.transport),
    }
    if outer.schedule is not None:
        parts |= {
            "outer.split": (SPLITS, {"type": outer.split}),
            "outer.compressor": (COMPRESSORS, outer.compressor),
            "outer.aggregation": (AGGREGATIONS, outer.aggregation),
            "outer.merge": (MERGES, outer.merge),
            "outer.optimizer": (OUTER_OPTIMIZERS, outer.optimizer),
        }
    if outer.gradient_compressor is not None:
        parts["outer.gradient_compressor"] = (COMPRESSORS, outer.gradient_compressor)
    return dict(found for name, (registry, spec) in parts.items() for found in _paths(name, registry, spec))


def _paths(name: str, registry: Registry, spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the import path of a component, and those of the components inside it."""
    yield name, registry.paths.get(spec["type"], spec["type"])
    for key, value in spec.items():
        if isinstance(value, dict) and "type" in value:
            yield from _paths(f"{name}.{key}", registry, value)
