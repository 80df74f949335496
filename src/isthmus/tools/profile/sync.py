"""The costs of a sync: this worker's own part is measured, the way over a slow uplink modelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import nn
from typing_extensions import override

from isthmus.compress import Compressor
from isthmus.config import RunConfig
from isthmus.core import SyncSchedule
from isthmus.core.streams import drain
from isthmus.core.types import Peers, State, Tensors
from isthmus.tools.sync_traffic import Hiding, SyncTraffic, Uplink
from isthmus.train.assemble import build_outer_loop
from isthmus.transport.local import Local, LocalWorld

_ROUNDS = 3  # after one that warms up


@dataclass(frozen=True)
class SyncSeconds:
    """The seconds that a worker alone needs to sync all fragments once."""

    codec_seconds: float  # encoding and decoding its own message
    outer_seconds: float  # all else: capture, checks, outer optimizer, parameters


@dataclass(frozen=True)
class ModelledUplink:
    """The costs of syncs on an uplink like this."""

    megabits_per_second: float
    round_trip_ms: float
    seconds: float  # to sync all fragments once
    local_steps: int  # the smallest H with which training hides that and the codec's work
    overlap_steps: int  # the smallest tau, then and with any larger H


class _TimedCompressor(Compressor):
    """A compressor that counts the seconds which another one takes."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor, self.seconds = compressor, 0.0

    @property
    @override
    def replicated(self) -> bool:
        return self._compressor.replicated

    @override
    def message_fraction(self, state: State) -> float:
        return self._compressor.message_fraction(state)

    @override
    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        drain()
        begin = time.perf_counter()
        result = self._compressor.average(local, state, peers, with_residual)
        drain()
        self.seconds += time.perf_counter() - begin
        return result


def measure_syncs(config: RunConfig, model: nn.Module, train: Callable[[], Any]) -> SyncSeconds:
    """Measure the configured outer loop in a few rounds without other workers; `train` is an inner step.

    Fragments follow one another here without steps between, and without a warm start.
    """
    planned = config.outer.schedule
    assert planned is not None
    num_fragments, has_full_delay = planned.num_fragments, planned.overlap_steps == planned.local_steps
    overlap_steps = num_fragments if has_full_delay else 0
    schedule = SyncSchedule(num_fragments, num_fragments, overlap_steps=overlap_steps)
    parts = {
        "outer": config.outer.model_copy(update={"schedule": schedule}),
        "train": config.train.model_copy(update={"steps": (_ROUNDS + 1) * num_fragments}),
    }
    loop = build_outer_loop(config.model_copy(update=parts), model, Local(LocalWorld(1), 0))
    timed = _TimedCompressor(loop.exchange.compressor)
    loop.exchange = replace(loop.exchange, compressor=timed)
    codec, whole = list[float](), list[float]()
    for _ in range(_ROUNDS + 1):
        train()
        drain()
        timed.seconds, begin = 0.0, time.perf_counter()
        for _ in range(num_fragments):
            loop.step()
        for sync in loop.state.in_flight.values():  # with a full delay
            assert sync.outcome is not None
            sync.outcome.result()
        drain()
        whole.append(time.perf_counter() - begin)
        codec.append(timed.seconds)
    loop.close()
    codec_seconds = median(codec[1:])
    return SyncSeconds(codec_seconds, median(whole[1:]) - codec_seconds)


def model_uplink(
    uplink: Uplink, traffic: Sequence[SyncTraffic], codec_seconds: float, step_seconds: float
) -> ModelledUplink:
    """Return from which H and tau on syncs hide behind inner steps on such an uplink.

    One fragment is synced at a time, and what is sent is encoded before and decoded after; a fragment is sent every
    H / P steps, so none has to wait for another where each gets through in that time.

    Args:
        uplink: of every worker.
        traffic: of each of the P fragments.
        codec_seconds: for all fragments; each has a share by its bytes.
        step_seconds: of an inner step.
    """
    total = sum(each.sent_bytes for each in traffic)
    seconds = [uplink.seconds(each) for each in traffic]
    hiding = Hiding.of(
        [took + codec_seconds * each.sent_bytes / total for took, each in zip(seconds, traffic, strict=True)],
        step_seconds,
    )
    return ModelledUplink(
        uplink.megabits_per_second, uplink.round_trip_ms, sum(seconds), hiding.local_steps, hiding.overlap_steps
    )
