"""All workers of the doctor on this machine, started as `isthmus launch` starts them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import yaml

from isthmus.config import RunConfig, dump
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.workers import world_environment
from isthmus.train.assemble import transport_class
from isthmus.train.run_folder import name_of

_POLL_SECONDS = 0.1


def doctor_on_this_machine(config: RunConfig) -> int:
    """Start `isthmus doctor` once for each worker; print what the first one has printed, and return the exit code."""
    options, num_workers = config.outer.transport, config.train.workers
    with (
        tempfile.TemporaryDirectory(prefix="isthmus-doctor-") as name,
        transport_class(config).serve(options, Path(name)) as served,
        ForkServer() as server,
    ):
        path, logs = Path(name) / "config.yaml", [Path(name) / f"{name_of(k)}.log" for k in range(num_workers)]
        outer = config.outer.model_copy(update={"transport": options | served})
        path.write_text(yaml.safe_dump(dump(config.model_copy(update={"outer": outer})), sort_keys=False))
        world = world_environment(num_workers) | {"LOCAL_WORLD_SIZE": str(num_workers)}
        server.import_modules(["isthmus.tools.doctor"])
        children = [
            server.start(["doctor", str(path)], world | {"RANK": str(k), "LOCAL_RANK": str(k)}, log, name_of(k))
            for k, log in enumerate(logs)
        ]
        try:
            while None in [child.poll() for child in children]:
                time.sleep(_POLL_SECONDS)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.close()
        print(logs[0].read_text(errors="replace"), end="")
        codes = [child.returncode for child in children]
    return next((code if code > 0 else 1 for code in codes if code), 0)
