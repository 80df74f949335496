"""What the workers' cards and links say together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median_low
from typing import Any

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.tools.doctor.check import Check, Status
from isthmus.tools.doctor.link import Link
from isthmus.tools.report import readable_bytes
from isthmus.transport.shared_config import check_shared_configs

_WARN_SECONDS, _FAIL_SECONDS = 1.0, 60.0  # between two clocks
_ROUND_TRIPS = 4  # of a sync: reports, two shots, vote
_BEARABLE = 0.1  # share of the time that training may spend waiting


def compare_workers(cards: dict[str, Any]) -> list[Check]:
    """Versions, configurations, data: what has to be equal."""
    names, workers = list(cards), list(cards.values())

    def alike(name: str, key: str, status: Status, good: str, advice: str) -> Check:
        try:
            check_shared_configs([worker[key] for worker in workers], names)
        except UserError as error:
            return Check(name, status, str(error), advice)
        return Check(name, "ok", good)

    first, everywhere = workers[0], "give all workers the same file and the same --set"
    versions = ", ".join(f"{what} {value}" for what, value in first["versions"].items())
    checks = [
        alike("isthmus", "isthmus", "fail", f"version {first['isthmus']['version']}", "install the same version"),
        alike("versions", "versions", "warn", versions, "the last bits of results may differ: install the same"),
        alike("configuration", "config", "fail", f"hash {first['hash']}", everywhere),
    ]
    if first["data"]:
        checks.append(alike("samples", "data", "fail", "the same, in the same order", "copy the data from one worker"))
    return checks


def compare_clocks(links: Iterable[Link], names: list[str]) -> Check:
    """Who is off, measured against the middle one of all clocks."""
    ahead = {names[0]: 0.0}
    ahead |= {link.there: link.ahead_seconds for link in links if link.here == names[0]}
    ahead |= {link.here: -link.ahead_seconds for link in links if link.there == names[0]}
    middle = median_low(ahead.values())
    reference = next(name for name, seconds in ahead.items() if seconds == middle)
    off = {name: seconds - middle for name, seconds in ahead.items() if abs(seconds - middle) > _WARN_SECONDS}
    widest = max(ahead.values()) - min(ahead.values())
    if not off:
        return Check("clocks", "ok", f"at most {widest:.3f} s apart")
    found = ", ".join(
        f"{name} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {reference}"
        for name, seconds in off.items()
    )
    status: Status = "fail" if max(map(abs, off.values())) > _FAIL_SECONDS else "warn"
    return Check("clocks", status, found, "set them by NTP: records in the DHT and certificates expire by the clock")


def judge_links(links: list[Link], sync_bytes: dict[str, int], config: RunConfig) -> list[Check]:
    """What the slowest link means for this configuration.

    Args:
        links: of all pairs.
        sync_bytes: that a worker sends for a sync of each fragment.
        config: of the run.
    """
    slowest = min(links, key=lambda link: link.slowest_bytes_per_second)
    round_trip = max(link.round_trip_seconds for link in links)
    count, rate = max(sync_bytes.values()), slowest.slowest_bytes_per_second
    seconds = count / rate + _ROUND_TRIPS * round_trip
    budget = config.outer.transport["sync_budget_seconds"]
    found = (
        f"{readable_bytes(count)} each over the slowest link, {readable_bits(rate)} ({slowest.here}, {slowest.there}): "
        f"{seconds:.2g} s of the {budget:g} s of sync_budget_seconds"
    )
    advice = (
        f"raise outer.transport.sync_budget_seconds above {2 * seconds:.0f}, or send less: another outer.compressor, "
        "more outer.schedule.num_fragments"
    )
    if seconds > budget:
        sync = Check("sync", "fail", found, advice)
    elif seconds > budget / 2:
        sync = Check("sync", "warn", found, advice)
    else:
        sync = Check("sync", "ok", found)
    return [sync, Check("pace", "ok", _pace(seconds, config))]


def _pace(seconds: float, config: RunConfig) -> str:
    """How long an inner step must be for syncs that take so long to cost little."""
    schedule = config.outer.schedule
    if schedule is not None and schedule.overlap_steps:
        tau = schedule.overlap_steps
        return f"a sync hides behind {tau} inner steps where one takes {seconds / tau:.2g} s or more"
    interval = schedule.local_steps // schedule.num_fragments if schedule is not None else 1
    least = seconds * (1 - _BEARABLE) / _BEARABLE / interval
    every = "after every inner step" if interval == 1 else f"every {interval} inner steps"
    return f"workers wait {seconds:.2g} s {every}: under {_BEARABLE:.0%} of the time where one takes {least:.2g} s"


def readable_bits(bytes_per_second: float) -> str:
    """A bandwidth as people write it: '95 Mbit/s'."""
    bits = 8 * bytes_per_second
    units = [(1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (float("inf"), "")]
    factor, unit = next(low for low, high in pairwise(units) if bits < high[0])
    return f"{bits / factor:.3g} {unit}"
