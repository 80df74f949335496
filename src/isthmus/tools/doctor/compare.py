"""The findings that the workers' reports and the network between them give together. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.tools.doctor.measure import Network
from isthmus.tools.report import readable_bytes
from isthmus.transport.shared_config import check_shared_configs

Status = Literal["ok", "warn", "fail"]
_WARN_SECONDS, _FAIL_SECONDS = 1.0, 60.0  # between two clocks
_ROUND_TRIPS = 4  # of a sync: reports, two shots, vote
_BEARABLE = 0.1  # share of the time that training may spend waiting


@dataclass(frozen=True)
class Check:
    """One finding of the doctor, with what to change."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to change; empty where all is well, or where `found` says it


def compare_workers(reports: dict[str, Any], expected_workers: int) -> list[Check]:
    """Check that all workers are here, with equal versions, configurations and data."""
    names, workers = list(reports), list(reports.values())

    def alike(name: str, key: str, status: Status, good: str, advice: str) -> Check:
        try:
            check_shared_configs([worker[key] for worker in workers], names)
        except UserError as error:
            return Check(name, status, str(error), advice)
        return Check(name, "ok", good)

    missing = sorted({f"worker-{worker}" for worker in range(expected_workers)} - set(names))
    first, everywhere = workers[0], "give all workers the same file and the same --set"
    versions = ", ".join(f"{what} {value}" for what, value in first["versions"].items())
    checks = [
        Check("workers", "fail", f"{', '.join(missing)} did not come", "start them, and let them reach the rendezvous")
        if missing
        else Check("workers", "ok", f"all {expected_workers} are here and answer"),
        alike("isthmus", "isthmus", "fail", f"version {first['isthmus']['version']}", "install the same version"),
        alike("versions", "versions", "warn", versions, "the last bits of results may differ: install the same"),
        alike("configuration", "config", "fail", f"hash {first['config_hash']}", everywhere),
    ]
    if first["data"]:
        checks.append(alike("samples", "data", "fail", "the same, in the same order", "copy the data from one worker"))
    return checks


def compare_clocks(names: list[str], network: Network) -> Check:
    """Check the clocks; the middle one of all counts as right."""
    ahead = dict(zip(names, network.clocks_ahead_seconds, strict=True))
    right = next(name for name, seconds in ahead.items() if seconds == 0)
    wrong = {name: seconds for name, seconds in ahead.items() if abs(seconds) > _WARN_SECONDS}
    if not wrong:
        return Check("clocks", "ok", f"at most {max(ahead.values()) - min(ahead.values()):.3f} s apart")
    found = ", ".join(
        f"{name} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {right}"
        for name, seconds in wrong.items()
    )
    status: Status = "fail" if max(map(abs, wrong.values())) > _FAIL_SECONDS else "warn"
    return Check("clocks", status, found, "set them by NTP: records in the DHT and certificates expire by the clock")


def judge_network(names: list[str], network: Network, sync_bytes: dict[str, int], config: RunConfig) -> list[Check]:
    """Judge what the slowest download means for this configuration, whose workers send so much for each fragment."""
    rate = min(network.download_bytes_per_second)
    slowest = names[network.download_bytes_per_second.index(rate)]
    count, budget = max(sync_bytes.values()), config.outer.transport["sync_budget_seconds"]
    seconds = count / rate + _ROUND_TRIPS * network.round_trip_seconds
    found = (
        f"{readable_bytes(count)} to each worker, to {slowest} with {readable_bits(rate)}: "
        f"{seconds:.2g} s of the {budget:g} s of sync_budget_seconds"
    )
    advice = (
        f"raise outer.transport.sync_budget_seconds above {2 * seconds:.0f}, or send less: another outer.compressor, "
        "more outer.schedule.num_fragments"
    )
    status: Status = "fail" if seconds > budget else "warn" if seconds > budget / 2 else "ok"
    sync = Check("sync", status, found, "" if status == "ok" else advice)
    return [sync, Check("pace", "ok", _pace(seconds, config))]


def _pace(seconds: float, config: RunConfig) -> str:
    """Say how long an inner step must take for syncs of so many seconds to cost little."""
    schedule = config.outer.schedule
    if schedule is not None and schedule.overlap_steps:
        tau = schedule.overlap_steps
        return f"a sync hides behind {tau} inner steps where one takes {seconds / tau:.2g} s or more"
    interval = schedule.local_steps // schedule.num_fragments if schedule is not None else 1
    least = seconds * (1 - _BEARABLE) / _BEARABLE / interval
    every = "after every inner step" if interval == 1 else f"every {interval} inner steps"
    return f"workers wait {seconds:.2g} s {every}: under {_BEARABLE:.0%} of the time where one takes {least:.2g} s"


def readable_bits(bytes_per_second: float) -> str:
    """Write a bandwidth as people do: '95 Mbit/s'."""
    bits = 8 * bytes_per_second
    units = [(1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (float("inf"), "")]
    factor, unit = next(low for low, high in pairwise(units) if bits < high[0])
    return f"{bits / factor:.3g} {unit}"
