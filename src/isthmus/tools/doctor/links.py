"""What the measured links mean: the table of pairs, the seconds of a sync, and from which schedule on it hides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from isthmus.config import RunConfig
from isthmus.core import SyncSchedule
from isthmus.tools.doctor.compare import Check, Status
from isthmus.tools.doctor.measure import Network
from isthmus.tools.report import readable_bytes
from isthmus.tools.sync_traffic import Hiding, SyncTraffic, readable_seconds

_BEARABLE = 0.1  # share of the time that training may spend waiting
_ALIKE = 0.8  # of two directions, or of S connections and S times one of them, the lesser over the larger
_LONG_WAY_SECONDS = 0.005  # of a round trip from which on a slow start costs anything
_MOST_PAIRS = 28  # in the table: those of eight workers
_STEP_SECONDS = (0.01, 0.1, 1.0, 10.0)  # where nothing is known of an inner step

SyncSeconds = dict[str, float]  # of each fragment


def sync_seconds(network: Network, traffic: dict[str, SyncTraffic]) -> SyncSeconds:
    """Return the seconds of a sync of each fragment on the links as they were measured, without the codecs' work."""
    return {fragment: sum(map(network.links.seconds, crossing.collectives)) for fragment, crossing in traffic.items()}


def judge_links(names: Sequence[str], network: Network) -> Check:
    """Name the slowest link, and those where the windows of their connections are what is slow."""
    a, b = min(network.pairs, key=lambda pair: network.rate[pair[0]][pair[1]])
    found = f"the slowest is {names[a]} to {names[b]}: {readable_bits(network.rate[a][b])}"
    bound = [
        f"{names[a]} to {names[b]}"
        for a, b in network.pairs
        if network.num_connections[a][b] > 1
        and network.rate[a][b] > _ALIKE * network.num_connections[a][b] * network.one_connection_rate[a][b]
    ]
    if not bound:
        return Check("links", "ok", found)
    found += f"; {', '.join(bound[:3])}{' and others' * (len(bound) > 3)} would carry more with larger windows"
    advice = "raise the largest values of net.ipv4.tcp_rmem and net.ipv4.tcp_wmem on these machines"
    return Check("links", "warn", found, advice)


def judge_tcp(rank: int, tcp: dict[str, Any], network: Network) -> Check:
    """Say how a worker's connections begin after idle steps; `tcp` is what its machine told (`tcp_settings`)."""
    control = tcp["congestion_control"] or "not known"
    is_far = max(network.round_trip_seconds[rank]) > _LONG_WAY_SECONDS
    if not (is_far and tcp["slow_start_after_idle"] and control != "bbr"):
        return Check("TCP", "ok", f"congestion control: {control}")
    found = f"{control} begins slowly after idle inner steps: every sync loses some round trips"
    advice = (
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0, or let the link use bbr: modprobe tcp_bbr, and add it to "
        "net.ipv4.tcp_allowed_congestion_control"
    )
    return Check("TCP", "warn", found, advice)


def judge_sync(
    names: Sequence[str],
    network: Network,
    traffic: dict[str, SyncTraffic],
    config: RunConfig,
    step_seconds: float | None = None,
) -> list[Check]:
    """Judge what the links mean for this configuration, whose inner steps take so long, if that is known."""
    of_fragments, budget = sync_seconds(network, traffic), config.outer.transport["sync_budget_seconds"]
    fragment, seconds = max(of_fragments.items(), key=lambda item: item[1])
    count = traffic[fragment].sent_bytes
    a, b = max(
        network.pairs,
        key=lambda pair: count / network.rate[pair[0]][pair[1]] + network.round_trip_seconds[pair[0]][pair[1]],
    )
    way = f"{readable_bits(network.rate[a][b])}, {readable_seconds(network.round_trip_seconds[a][b])} there and back"
    found = (
        f"each worker sends {readable_bytes(count)}: {readable_seconds(seconds)} of the {budget:g} s of "
        f"sync_budget_seconds; worst from {names[a]} to {names[b]} ({way})"
    )
    advice = (
        f"raise outer.transport.sync_budget_seconds above {2 * seconds:.0f}, or send less: another outer.compressor, "
        "more outer.schedule.num_fragments"
    )
    status: Status = "fail" if seconds > budget else "warn" if seconds > budget / 2 else "ok"
    sync = Check("sync", status, found, "" if status == "ok" else advice)
    return [sync, _judge_pace(list(of_fragments.values()), config.outer.schedule, step_seconds)]


def _judge_pace(of_fragments: list[float], schedule: SyncSchedule | None, step_seconds: float | None) -> Check:
    """Say which share of the time workers wait for syncs, or how long an inner step must take for that to be small."""
    seconds, tau = max(of_fragments), schedule.overlap_steps if schedule is not None else 0
    interval = schedule.local_steps // schedule.num_fragments if schedule is not None else 1
    every = "after every inner step" if interval == 1 else f"every {interval} inner steps"
    steps = f"{tau} inner step{'s' * (tau > 1)}"
    if step_seconds is None and tau:
        least = readable_seconds(seconds / tau)
        return Check("pace", "ok", f"a sync hides behind {steps} where one takes {least} or more")
    if step_seconds is None:
        least = readable_seconds(seconds * (1 - _BEARABLE) / _BEARABLE / interval)
        waits = f"workers wait {readable_seconds(seconds)} {every}"
        return Check("pace", "ok", f"{waits}: under {_BEARABLE:.0%} of the time where one takes {least}")
    exposed = max(0.0, seconds - tau * step_seconds)
    share = exposed / (exposed + interval * step_seconds)
    if tau:
        hidden = f"behind {steps} {readable_seconds(seconds - exposed)} of a sync's {readable_seconds(seconds)} hide"
        found = f"{hidden}; workers wait {share:.1%} of the time"
    else:
        found = f"workers wait {readable_seconds(seconds)} {every}: {share:.1%} of the time"
    if share <= _BEARABLE or schedule is None:
        return Check("pace", "ok" if share <= _BEARABLE else "warn", found)
    hiding, enough = Hiding.of(of_fragments, step_seconds), _enough_local_steps(of_fragments, step_seconds)
    advice = (
        f"set outer.schedule.local_steps to {enough:,} or more; or, with a merge that takes it, overlap_steps to "
        f"{hiding.overlap_steps:,} and local_steps to {hiding.local_steps:,} or more"
    )
    return Check("pace", "warn", found, advice)


def _enough_local_steps(of_fragments: Sequence[float], step_seconds: float) -> int:
    """Return the smallest H with which workers wait a bearable share of the time where nothing overlaps."""
    interval = math.ceil(max(of_fragments) * (1 - _BEARABLE) / _BEARABLE / step_seconds)
    return len(of_fragments) * max(1, interval)


def link_table(names: Sequence[str], network: Network) -> Table:
    """Return the table of all pairs, or of the slowest where there are many; a row where both directions are alike."""
    table = Table("link", box=SIMPLE_HEAD)
    for header in ("round trip", "one connection", "connections", "all of them"):
        table.add_column(header, justify="right")
    slowest = sorted(((a, b) for a, b in network.pairs if a < b), key=lambda pair: min(_rate_of_pair(network, *pair)))
    for a, b in sorted(slowest[:_MOST_PAIRS]):
        forth, back = _rate_of_pair(network, a, b)
        alike = min(forth, back) > _ALIKE * max(forth, back)
        for sender, receiver in ((a, b),) if alike else ((a, b), (b, a)):
            table.add_row(
                f"{names[sender]} {'and' if alike else 'to'} {names[receiver]}",
                readable_seconds(network.round_trip_seconds[sender][receiver]),
                readable_bits(network.one_connection_rate[sender][receiver]),
                f"{network.num_connections[sender][receiver]:g}",
                readable_bits(network.rate[sender][receiver]),
            )
    shown = f"the {_MOST_PAIRS} slowest of {len(slowest)} pairs; " if len(slowest) > _MOST_PAIRS else ""
    table.caption = f"{shown}one direction at a time; connections: as many as the link opens"
    return table


def hiding_table(seconds: SyncSeconds, step_seconds: float | None = None) -> Table:
    """Return from which schedule on syncs hide, for inner steps of a known length or of several."""
    table = Table("an inner step takes", box=SIMPLE_HEAD)
    for header in (
        "a sync hides from\noverlap_steps (tau)",
        "and\nlocal_steps (H)",
        f"without overlap waits are\nunder {_BEARABLE:.0%} from local_steps",
    ):
        table.add_column(header, justify="right")
    of_fragments = list(seconds.values())
    for step in _STEP_SECONDS if step_seconds is None else (step_seconds,):
        hiding = Hiding.of(of_fragments, step)
        enough = _enough_local_steps(of_fragments, step)
        table.add_row(readable_seconds(step), f"{hiding.overlap_steps:,}", f"{hiding.local_steps:,}", f"{enough:,}")
    return table


def _rate_of_pair(network: Network, a: int, b: int) -> tuple[float, float]:
    return network.rate[a][b], network.rate[b][a]


def readable_bits(bytes_per_second: float) -> str:
    """Write a bandwidth as people do: '95 Mbit/s'."""
    bits = 8 * bytes_per_second
    units = [(1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (float("inf"), "")]
    factor, unit = next(low for low, high in pairwise(units) if bits < high[0])
    return f"{bits / factor:.3g} {unit}"
