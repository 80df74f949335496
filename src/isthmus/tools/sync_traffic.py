"""What crosses between the workers in a sync, counted without starting them, and the seconds that takes on a link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.compress import Compressor
from isthmus.config import OuterConfig, RunConfig, build_compressor, build_gradient_compressor
from isthmus.core import SPLITS, Tensors
from isthmus.models import MODELS, outline
from isthmus.outer import Guard
from isthmus.outer.gradients import GRADIENTS, weight_compressor
from isthmus.spec import build
from isthmus.train.assemble import is_elastic
from isthmus.transport.link_model import Collective, LinkModel
from isthmus.transport.local import Local, LocalWorld, run_workers
from isthmus.transport.peers import ring_bytes


@dataclass(frozen=True)
class SyncTraffic:
    """What crosses in one sync of a fragment, or in a step that averages gradients."""

    sent_bytes: int  # by a worker, as a mean over the workers
    num_trips: int  # one-way, that follow one another
    collectives: Sequence[Collective] = ()  # in order


@dataclass(frozen=True)
class StartTraffic:
    """What crosses in a warm start that averages gradients."""

    gradients: SyncTraffic  # in every step
    weights: SyncTraffic  # in a sync of all fragments


@dataclass(frozen=True)
class Uplink:
    """A worker's way to the others as it is modelled: everything that it sends goes through it."""

    megabits_per_second: float
    round_trip_ms: float = 0.0

    def seconds(self, traffic: SyncTraffic) -> float:
        """Return the seconds of a sync: its bytes at the rate that the link's connections reach, and its trips."""
        rate = LinkModel.even(2, self.megabits_per_second, self.round_trip_ms).rate(0, 1)
        return 8 * traffic.sent_bytes / rate + traffic.num_trips * self.round_trip_ms / 2e3


@dataclass(frozen=True)
class Hiding:
    """From which schedule on inner steps of some length hide the syncs."""

    local_steps: int  # the smallest H
    overlap_steps: int  # the smallest tau, then and with any larger H

    @classmethod
    def of(cls, fragment_seconds: Sequence[float], step_seconds: float) -> Hiding:
        """Return it for the seconds of a sync of each fragment, one of which is sent every H / P steps."""
        overlap_steps = max(1, math.ceil(max(fragment_seconds) / step_seconds))
        return cls(len(fragment_seconds) * overlap_steps, overlap_steps)


def sync_traffic(config: RunConfig, model: nn.Module | None = None) -> dict[str, SyncTraffic]:
    """Return what crosses in one sync of each fragment, with reports, votes and, in an elastic world, a rendezvous.

    That is counted, not computed: all workers average zeros in this process. Without an outer loop it is what torch's
    ring sends in every step. `model` is its outline, if there is one already.
    """
    workers, outer = config.train.workers, config.outer
    model = outline(build(MODELS, config.model)) if model is None else model
    if outer.schedule is None or outer.compressor is None:
        payload_bytes = 4 * sum(param.numel() for param in model.parameters())
        all_reduce = [Collective("all_reduce", [[payload_bytes]] * workers)]
        return {GRADIENTS: SyncTraffic(ring_bytes(payload_bytes, workers), 2 * (workers - 1), all_reduce)}
    return _count(config, build_compressor(outer), _synced(outer, model), votes=True)


def start_traffic(config: RunConfig, model: nn.Module) -> StartTraffic | None:
    """Return what crosses in a warm start that averages gradients; None where none does."""
    compressor = build_gradient_compressor(config.outer)
    if compressor is None or config.outer.schedule is None or not config.outer.schedule.warm_start_steps:
        return None
    gradients = [torch.zeros(param.shape) for param in model.parameters() if param.requires_grad]
    of_gradients = _count(config, compressor, {GRADIENTS: gradients}, votes=False)[GRADIENTS]
    fragments = _count(config, weight_compressor(compressor), _synced(config.outer, model), votes=True).values()
    of_weights = SyncTraffic(
        sent_bytes=sum(each.sent_bytes for each in fragments),
        num_trips=sum(each.num_trips for each in fragments),
        collectives=[collective for each in fragments for collective in each.collectives],
    )
    return StartTraffic(of_gradients, of_weights)


def _synced(outer: OuterConfig, model: nn.Module) -> dict[str, Tensors]:
    """Return zeros in the shapes of what every fragment syncs."""
    assert outer.schedule is not None
    fragments = SPLITS.get(outer.split)(model, outer.schedule.num_fragments)
    return {fragment.name: [torch.zeros(anchor.shape) for anchor in fragment.anchor] for fragment in fragments}


def _count(
    config: RunConfig, compressor: Compressor, synced: dict[str, Tensors], votes: bool
) -> dict[str, SyncTraffic]:
    """Count what crosses while all workers average these tensors, which are zeros, one group after the other."""
    workers = config.train.workers
    world = LocalWorld(workers, has_rendezvous=workers > 1 and is_elastic(config))
    world.recorded = []
    ends = [0] * len(synced)  # of each one's collectives in the record

    @torch.no_grad()
    def sync(rank: int, transport: Local) -> list[int]:
        sent = []
        for step, nothing in enumerate(synced.values()):
            peers = transport.quorum(step)
            Guard().screen(nothing, 0, 0, {}, peers)
            compressor.average(nothing, {}, peers, with_residual=False)
            if votes:
                transport.commit(peers, True)
            sent.append(peers.sent_bytes)
            if rank == 0:
                ends[step] = len(world.recorded or ())
        return sent

    totals = [sum(counts) for counts in zip(*run_workers(world, sync), strict=True)]
    of_groups = [world.recorded[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    return {
        name: SyncTraffic(total // workers, _num_trips(workers, collectives), collectives)
        for name, total, collectives in zip(synced, totals, of_groups, strict=True)
    }


def readable_seconds(seconds: float) -> str:
    """Return a duration as people read it: '12.3 ms'."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _num_trips(workers: int, collectives: Sequence[Collective]) -> int:
    nothing_but_the_way = LinkModel.between(workers, None, 1.0)
    return round(sum(map(nothing_but_the_way.seconds, collectives)))
