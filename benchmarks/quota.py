"""A CPU quota for one process: by a cgroup where one can be made, else by stopping the process now and then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PERIOD_SECONDS = 0.03  # short against an inner step or a few, as of a slower processor
_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def quota(process: int, share: float) -> Iterator[str]:
    """Give a process this share of one core while the context lasts; yields how, in words."""
    folder = _make_group(share)
    if folder is None:
        with _halting(process, share):
            yield f"SIGSTOP for {1 - share:.0%} of every {1000 * _PERIOD_SECONDS:.0f} ms"
        return
    try:
        (folder / "cgroup.procs").write_text(str(process))
        yield f"a cgroup with {share:.1%} of every {1000 * _PERIOD_SECONDS:.0f} ms"
    finally:
        with suppress(OSError):
            (folder.parent / "cgroup.procs").write_text(str(process))
        folder.rmdir()


def _make_group(share: float) -> Path | None:
    """A cgroup (version 1 or 2) with a quota; None where this machine or user may not have one."""
    period = int(1e6 * _PERIOD_SECONDS)
    name = f"isthmus-quota-{os.getpid()}"
    for parent, limits in (
        (_CGROUPS / "cpu", {"cpu.cfs_period_us": f"{period}", "cpu.cfs_quota_us": f"{int(share * period)}"}),
        (_CGROUPS, {"cpu.max": f"{int(share * period)} {period}"}),
    ):
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if all((folder / file).exists() for file in limits):
            for file, value in limits.items():
                (folder / file).write_text(value)
            return folder
        folder.rmdir()
    return None


@contextmanager
def _halting(process: int, share: float) -> Iterator[None]:
    done = threading.Event()

    def halt() -> None:
        with suppress(ProcessLookupError):
            while not done.wait(share * _PERIOD_SECONDS):
                os.kill(process, signal.SIGSTOP)
                done.wait((1 - share) * _PERIOD_SECONDS)
                os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=halt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
