"""What can be known of a run before its workers start: `show` and `launch` say it at once, in one line."""

from __future__ import annotations

from torch import nn

from isthmus.compress import COMPRESSORS
from isthmus.config import RunConfig
from isthmus.core import SPLITS
from isthmus.inner import LR_SCHEDULES
from isthmus.models import ModelSpec, outline
from isthmus.models.stages import check_stages
from isthmus.outer import MERGES
from isthmus.parallel import tensor_plan
from isthmus.parallel.pipeline import count_micro_batches
from isthmus.spec import build
from isthmus.train.assemble import build_model_spec, check_data, check_inner_step, transport_class


def check_run(config: RunConfig) -> None:
    """Refuse a run that cannot begin: nothing is built, read or joined that takes more than a moment.

    Raises:
        UserError: one line that names what is wrong.
    """
    transport_class(config)
    spec = build_model_spec(config)
    check_data(config, spec)
    sketch = outline(spec)
    check_inner_step(config, sketch)
    build(LR_SCHEDULES, config.inner.lr_schedule).over(config.train.steps)
    _check_mesh(config, spec, sketch)
    _check_method(config, sketch)


def _check_mesh(config: RunConfig, spec: ModelSpec, sketch: nn.Module) -> None:
    mesh, inner = config.mesh, config.inner
    tensor_plan(spec, mesh.tp)
    if mesh.pp > 1 and inner.micro_batch_size != "auto":
        check_stages(spec, sketch, mesh.pp * mesh.stages_per_rank)
        size = inner.batch_size // mesh.shard
        count_micro_batches(size, inner.micro_batch_size, mesh.pp, mesh.stages_per_rank)


def _check_method(config: RunConfig, sketch: nn.Module) -> None:
    outer = config.outer
    if outer.schedule is not None and outer.compressor is not None and outer.merge is not None:
        build(COMPRESSORS, outer.compressor)
        build(MERGES, outer.merge)
        if config.mesh.pp == 1:  # else each stage is split by itself
            SPLITS.get(outer.split)(sketch, outer.schedule.num_fragments)
