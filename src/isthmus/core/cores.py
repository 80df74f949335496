"""The cores that this process may use: those of its machine, less what a container or a scheduler keeps from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch


def num_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    That is its affinity, or the quota of a control group where that is less: such a group lets a process run on all
    cores of a machine, for a part of the time.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(quota_in_cores(), allowed)))


def limit_threads() -> None:
    """Have torch start no more threads than there are cores for, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ and num_cores() < torch.get_num_threads():
        torch.set_num_threads(num_cores())


def quota_in_cores(proc: Path = Path("/proc/self")) -> float:
    """Return the smallest quota of this process's control groups, version 1 or 2; infinite where there is none."""
    return min(_quotas(proc), default=float("inf"))


def _quotas(proc: Path) -> Iterator[float]:
    for mount, group in _groups(proc):
        for folder in (group, *group.parents):  # a container may see its own group as the root
            path = mount / str(folder).lstrip("/")
            with suppress(OSError, ValueError):  # no such file; "max"
                if (path / "cpu.max").exists():
                    quota, period = (path / "cpu.max").read_text().split()
                else:
                    quota, period = ((path / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                if int(quota) > 0:
                    yield int(quota) / int(period)


def _groups(proc: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the mounts of control groups that can have a quota, and this process's group in each."""
    with suppress(OSError, ValueError):
        groups = dict[str, str]()
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), group)
        for line in (proc / "mountinfo").read_text().splitlines():
            place, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 ") and "" in groups:
                yield Path(place.split()[4]), Path(groups[""])
            elif kind.startswith("cgroup ") and "cpu" in kind.split()[2].split(",") and "cpu" in groups:
                yield Path(place.split()[4]), Path(groups["cpu"])
