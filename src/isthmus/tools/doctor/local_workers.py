"""All workers of the doctor's on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from isthmus.config import RunConfig, dump
from isthmus.recipes.load import ENVIRONMENT_PREFIX
from isthmus.train.assemble import transport_class
from isthmus.transport.address import free_port


def doctor_on_this_machine(config: RunConfig) -> int:
    """Start `isthmus doctor` once for each worker, the first of which prints; returns the exit code."""
    transport = config.outer.transport
    with (
        tempfile.TemporaryDirectory(prefix="isthmus-doctor-") as folder,
        transport_class(config).serve(transport, Path(folder)) as served,
    ):
        outer = config.outer.model_copy(update={"transport": transport | served})
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(dump(config.model_copy(update={"outer": outer})), sort_keys=False))
        return _run(path, config.train.workers)


def _run(path: Path, workers: int) -> int:
    # the configuration is final, so no layer of it is inherited
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    size = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    world = inherited | size | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "isthmus", "doctor", str(path)],
            stdout=subprocess.DEVNULL if worker else None,
            env=world | {"RANK": str(worker), "LOCAL_RANK": str(worker)},
        )
        for worker in range(workers)
    ]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    return next((code if code > 0 else 1 for code in codes if code), 0)
