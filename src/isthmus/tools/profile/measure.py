"""Making a profile: all measurements, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.data import open_batches
from isthmus.tools.profile.device import describe_device, matrix_size, median_seconds, peak_flops
from isthmus.tools.profile.inner_step import MicroBatch, count_flops, try_micro_batches
from isthmus.tools.profile.sync import ModelledUplink, SyncSeconds, measure_syncs, model_uplink
from isthmus.tools.report import LINKS
from isthmus.tools.show import sync_bytes
from isthmus.train import assemble, random_state


@dataclass(frozen=True)
class Profile:
    """The figures of one worker of a configuration, alone on this machine."""

    device: str
    num_parameters: int
    batch_size: int  # samples of a step
    micro_batches: list[MicroBatch]
    fastest: int  # of these sizes
    micro_batch_size: int  # of the configuration, with which the figures below were measured
    step_seconds: float
    tokens_per_second: float  # images or seconds of sound, where there are no tokens
    precision: str
    flops_per_step: int
    matrix_size: int  # of the product that is the measure
    peak_flops_per_second: float
    flops_utilisation: float  # of that peak
    sync: SyncSeconds | None  # None: no outer loop, as with ddp
    workers: int  # that share a sync
    sync_bytes: dict[str, int]  # that each of them sends, by fragment; without an outer loop at every step
    links: list[ModelledUplink]


def profile(config: RunConfig) -> Profile:
    """Measure a configuration, in a minute or so where a step takes a second; nothing is written.

    Raises:
        UserError: something in the configuration or the data does not fit, or not into memory.
    """
    if config.mesh.num_ranks > 1:
        raise UserError("only a worker of one rank is profiled: set mesh.shard, mesh.tp and mesh.pp to 1")
    inner, seed = config.inner, config.train.seed
    spec = assemble.build_model_spec(config)
    data_set = assemble.open_data(config, spec)
    device = assemble.choose_device()
    model = spec.build(seed).to(device)
    random_state.seed(seed, 0)
    step = assemble.build_inner_step(config, model)
    stream = open_batches(data_set, seed, inner.batch_size, 0, 1)
    batch = {name: tensor.to(device) for name, tensor in next(stream).items()}

    micro_batches = try_micro_batches(step, batch)
    fastest = max(micro_batches, key=lambda tried: tried.samples_per_second).size
    size = _configured(inner.micro_batch_size, inner.batch_size, micro_batches, fastest)
    step.micro_batch_size = size

    def train() -> None:
        step.set_progress(0)  # the same learning rate every time
        step(batch)

    flops = count_flops(step, batch)
    step_seconds = median_seconds(train)
    peak = peak_flops(device, getattr(torch, inner.precision))
    sync = measure_syncs(config, model, train) if config.outer.schedule else None
    several = config.train.model_copy(update={"workers": max(2, config.train.workers)})  # one alone sends nothing
    sent = sync_bytes(config.model_copy(update={"train": several}))
    links = (
        [model_uplink(link, list(sent.values()), sync.codec_seconds, step_seconds) for link in LINKS] if sync else []
    )
    return Profile(
        device=describe_device(device),
        num_parameters=sum(param.numel() for param in model.parameters()),
        batch_size=inner.batch_size,
        micro_batches=micro_batches,
        fastest=fastest,
        micro_batch_size=size,
        step_seconds=step_seconds,
        tokens_per_second=stream.tokens_per_batch / step_seconds,
        precision=inner.precision,
        flops_per_step=flops,
        matrix_size=matrix_size(device),
        peak_flops_per_second=peak,
        flops_utilisation=flops / step_seconds / peak,
        sync=sync,
        workers=several.workers,
        sync_bytes=sent,
        links=links,
    )


def _configured(configured: Any, batch_size: int, tried: list[MicroBatch], fastest: int) -> int:
    """Return the micro-batch size that training would use."""
    size = fastest if configured == "auto" else min(configured or batch_size, batch_size)
    largest = max(micro_batch.size for micro_batch in tried)
    if size > largest:
        raise UserError(
            f"micro-batches of {size} samples do not fit into memory, {largest} do: "
            "set inner.micro_batch_size to that, or to auto"
        )
    return int(size)
