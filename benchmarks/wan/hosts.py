"""Hosts with shaped links on this machine, a process on each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.network import NETLAB, netlab

Command = Callable[[Path], list[str]]
_SECONDS = 3600


def launch(folder: Path, mbit: list[float], command: Command) -> list[Any]:
    """Run a program on hosts, each on a core as long as there are enough; what they wrote. Not repeated if there.

    Args:
        folder: of the run.
        mbit: the rate of every host's link; 0: not limited.
        command: module and arguments for a file to write to.

    Raises:
        SystemExit: a worker failed; with the end of its log.
    """
    results = [folder / f"worker-{rank}.json" for rank in range(len(mbit))]
    if not all(result.exists() for result in results):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        netlab("up", str(len(mbit)), "0")
        for host, rate in enumerate(mbit):
            netlab("rate", f"{rate:.3f}" if rate else "0", str(host))
        try:
            run_on_hosts(folder, [command(result) for result in results])
        finally:
            netlab("down")
    return [json.loads(result.read_text()) for result in results]


def run_on_hosts(folder: Path, commands: list[list[str]]) -> None:
    """Run a module with arguments on every host that is up; see `launch`."""
    environment = os.environ | {
        "MASTER_ADDR": "10.77.0.10",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(len(commands)),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    processes = []
    for rank, command in enumerate(commands):
        pin = ["taskset", "-c", str(rank)] if len(commands) <= (os.cpu_count() or 1) else []
        with (folder / f"worker-{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [NETLAB, "exec", str(rank), *pin, sys.executable, "-m", *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | {"RANK": str(rank)},
                )
            )
    try:
        codes = [process.wait(_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = "\n".join((folder / f"worker-{rank}.log").read_text()[-1500:] for rank in range(len(commands)))
        raise SystemExit(f"{folder.name} failed with {codes}:\n{logs}")
