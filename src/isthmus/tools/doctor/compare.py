"""The findings that the workers' reports and the network between them give together. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.core import UserError
from isthmus.tools.doctor.measure import Network
from isthmus.transport.shared_config import check_shared_configs

Status = Literal["ok", "warn", "fail"]
_WARN_SECONDS, _FAIL_SECONDS = 1.0, 60.0  # between two clocks


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
