"""Making a profile, all measurements one after the other, and printing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.core.cores import limit_threads
from isthmus.data import open_batches
from isthmus.tools.profile.inner_step import (
    MicroBatch,
    count_flops,
    describe_device,
    matrix_size,
    median_seconds,
    peak_flops,
    try_micro_batches,
)
from isthmus.tools.profile.sync import ModelledUplink, SyncSeconds, measure_syncs, model_uplink
from isthmus.tools.report import LINKS, readable_bytes
from isthmus.tools.sync_traffic import Uplink, readable_seconds, sync_traffic
from isthmus.train import assemble, random_state

Row = tuple[str, str, str]  # the figure's name, its value, how it is meant


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


def profile(config: RunConfig, round_trip_ms: float = 0.0) -> Profile:
    """Measure a configuration, in a minute or so where a step takes a second; nothing is written.

    The links to the other workers are modelled with this round trip.
    """
    if config.mesh.num_ranks > 1:
        raise UserError("only a worker of one rank is profiled: set mesh.shard, mesh.tp and mesh.pp to 1")
    limit_threads()
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
    if inner.compile:
        torch.compiler.reset()  # what was compiled serves all sizes that were tried, but training has one

    def train() -> None:
        step.set_progress(0)  # the same learning rate every time
        step(batch)

    flops = count_flops(step, batch)
    step_seconds = median_seconds(train)
    peak = peak_flops(device, getattr(torch, inner.precision))
    sync = measure_syncs(config, model, train) if config.outer.schedule else None
    several = config.train.model_copy(update={"workers": max(2, config.train.workers)})  # one alone sends nothing
    traffic = sync_traffic(config.model_copy(update={"train": several}))
    uplinks = [Uplink(rate, round_trip_ms) for rate in LINKS] if sync else []
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
        sync_bytes={fragment: each.sent_bytes for fragment, each in traffic.items()},
        links=[
            model_uplink(uplink, list(traffic.values()), sync.codec_seconds, step_seconds) for uplink in uplinks if sync
        ],
    )


def _configured(configured: Any, batch_size: int, tried: list[MicroBatch], fastest: int) -> int:
    """Return the micro-batch size that training would use."""
    size = fastest if configured == "auto" else min(configured or batch_size, batch_size)
    largest = max(micro_batch.size for micro_batch in tried)
    if size > largest:
        found = f"micro-batches of {size} samples do not fit into memory, {largest} do"
        raise UserError(f"{found}: set inner.micro_batch_size to that, or to auto")
    return int(size)


def show_profile(profile: Profile, console: Console) -> None:
    """Print a profile."""
    if not console.is_terminal:
        for what, value, note in rows(profile):
            console.print(f"{what}: {value}" + (f" ({note})" if note else ""), soft_wrap=True, markup=False)
        return
    table = Table("what", box=SIMPLE_HEAD)
    table.add_column("measured", justify="right")
    table.add_column("how", overflow="fold")
    for row in rows(profile):
        table.add_row(*row)
    console.print(table)


def rows(profile: Profile) -> Iterator[Row]:
    """Yield the lines of the table in order."""
    yield "device", profile.device, ""
    yield "parameters", f"{profile.num_parameters:,}", ""
    for tried in profile.micro_batches:
        note = f"{tried.samples_per_second:,.1f} samples/s forward and backward"
        note += ", the fastest" if tried.size == profile.fastest else ""
        yield f"memory, micro-batches of {tried.size}", readable_bytes(tried.peak_bytes), note
    size, batch_size = profile.micro_batch_size, profile.batch_size
    yield "inner step", readable_seconds(profile.step_seconds), f"{batch_size} samples in micro-batches of {size}"
    yield "tokens/s", f"{profile.tokens_per_second:,.0f}", "images or seconds of sound, where there are no tokens"
    yield "FLOPs per step", _flops(profile.flops_per_step), "matrix products, convolutions, attention"
    size = profile.matrix_size
    product = f"the fastest {profile.precision} product of two {size:,} x {size:,} matrices"
    yield "peak, measured", f"{_flops(profile.peak_flops_per_second)}/s", f"{product} here and now"
    yield "FLOPs utilisation", f"{profile.flops_utilisation:.1%}", "of that peak, in an inner step"
    yield from _syncs(profile)


def _syncs(profile: Profile) -> Iterator[Row]:
    total, workers = sum(profile.sync_bytes.values()), profile.workers
    if profile.sync is None:
        yield "bytes per step", readable_bytes(total), f"sent by each of {workers} workers, after every inner step"
        return
    fragments = f"{len(profile.sync_bytes)} fragments" if len(profile.sync_bytes) > 1 else "the whole model"
    yield "codec", readable_seconds(profile.sync.codec_seconds), f"encode and decode one's own message, {fragments}"
    yield "outer step", readable_seconds(profile.sync.outer_seconds), "the rest of a sync, without the network"
    yield "bytes per sync", readable_bytes(total), f"sent by each of {workers} workers, {fragments}"
    for link in profile.links:
        hides = f"hides behind training from H = {link.local_steps:,} on, with tau = {link.overlap_steps:,} or more"
        way = f", {link.round_trip_ms:g} ms" if link.round_trip_ms else ""
        yield f"at {link.megabits_per_second:,} Mbit/s{way}, modelled", readable_seconds(link.seconds), hides


def _flops(count: float) -> str:
    """Write a number of FLOPs: '12.3 GFLOP'."""
    unit, size = next((u, s) for u, s in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 0.0)) if count >= s)
    return f"{count / (size or 1e6):.3g} {unit}FLOP"
