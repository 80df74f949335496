"""All measurements of a profile, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.data import open_batches
from isthmus.tools.profile.device import describe, matrix_size, peak_flops, seconds_of
from isthmus.tools.profile.inner import MicroBatch, count_flops, try_sizes
from isthmus.tools.profile.sync import Link, SyncTimes, measure_syncs, model_link
from isthmus.tools.report import LINKS
from isthmus.tools.show import sync_bytes
from isthmus.train import assemble, random_state


@dataclass(frozen=True)
class Profile:
    """What a worker of this configuration does on this machine, alone on it."""

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
    sync: SyncTimes | None  # None: no outer loop, as with ddp
    workers: int  # that share a sync
    sync_bytes: dict[str, int]  # that each of them sends, by fragment; without an outer loop at every step
    links: list[Link]


def profile(config: RunConfig) -> Profile:
    """Measure; takes a minute or so where a step takes a second. Nothing is written.

    Raises:
        UserError: something in the configuration or the data does not fit, or not into memory.
    """
    if config.mesh.num_ranks > 1:
        raise UserError("profile: it measures a worker of one rank; set mesh.shard, mesh.tp and mesh.pp to 1")
    inner, seed = config.inner, config.train.seed
    spec = assemble.build_model_spec(config)
    data_set = assemble.open_data(config, spec)
    device = assemble.choose_device()
    model = spec.build(seed).to(device)
    random_state.seed(seed, 0)
    step = assemble.build_inner_step(config, model)
    stream = open_batches(data_set, seed, inner.batch_size, 0, 1)
    batch = {name: tensor.to(device) for name, tensor in next(stream).items()}

    micro_batches = try_sizes(step, batch)
    fastest = max(micro_batches, key=lambda tried: tried.samples_per_second).size
    size = _configured(inner.micro_batch_size, inner.batch_size, micro_batches, fastest)
    step.micro_batch_size = size

    def train() -> None:
        step.set_progress(0)  # the same learning rate every time
        step(batch)

    flops = count_flops(step, batch)
    step_seconds = seconds_of(train)
    peak = peak_flops(device, getattr(torch, inner.precision))
    sync = measure_syncs(config, model, train) if config.outer.schedule else None
    crowd = config.train.model_copy(update={"workers": max(2, config.train.workers)})  # one alone sends nothing
    sent = sync_bytes(config.model_copy(update={"train": crowd}))
    links = [model_link(link, list(sent.values()), sync.codec_seconds, step_seconds) for link in LINKS] if sync else []
    return Profile(
        device=describe(device),
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
        workers=crowd.workers,
        sync_bytes=sent,
        links=links,
    )


def _configured(configured: Any, batch_size: int, tried: list[MicroBatch], fastest: int) -> int:
    """The micro-batch size that training would use."""
    size = fastest if configured == "auto" else min(configured or batch_size, batch_size)
    largest = max(micro_batch.size for micro_batch in tried)
    if size > largest:
        raise UserError(
            f"profile: micro-batches of {size} samples do not fit into memory, {largest} do: "
            "set inner.micro_batch_size to that, or to auto"
        )
    return int(size)
