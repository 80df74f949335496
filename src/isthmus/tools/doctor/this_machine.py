"""The checks that a worker can make alone: of its folder, data, names and ports."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.data import open_batches
from isthmus.link.lane import prepare
from isthmus.models import outline
from isthmus.tools.doctor.compare import Check, Status
from isthmus.tools.report import readable_bytes
from isthmus.train import assemble
from isthmus.train.run_folder import metrics_path
from isthmus.transport.address import resolve
from isthmus.transport.configured import Finding

_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_STATE_COPIES = 6  # at most: parameters, anchor, outer momentum, compressor memory, AdamW's two moments
_Finding = tuple[Status, str, str]


def check_this_machine(config: RunConfig, worker: int) -> list[Check]:
    """Make all checks that need no other worker."""
    looks: dict[str, Callable[[], _Finding]] = {
        "run folder": lambda: _run_folder(config, worker),
        "disk": lambda: _disk(config),
        "data": lambda: _data(config, worker),
        "host name": _host_name,
    }
    return [*(_look(name, look) for name, look in looks.items()), *_rendezvous(config)]


def tcp_settings() -> dict[str, Any]:
    """Return how connections of the link find their rate on this machine, as far as its system says."""
    with socket.socket() as connection:
        prepare(connection)
        known = hasattr(socket, "TCP_CONGESTION")
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) if known else b""
    try:
        slow_start_after_idle = _SLOW_START.read_text().strip() != "0"
    except OSError:
        slow_start_after_idle = False
    return {"congestion_control": name.split(b"\0")[0].decode(), "slow_start_after_idle": slow_start_after_idle}


def data_fingerprint(config: RunConfig) -> str:
    """Return what differs where samples or their order do, which workers of an elastic run must share."""
    try:
        data_set = assemble.open_data(config, assemble.build_model_spec(config))
        return data_set.sample_order(config.train.seed).fingerprint
    except UserError:
        return "unreadable"  # the check of the data says why


def _rendezvous(config: RunConfig) -> list[Check]:
    """Check the place where workers find one another, as far as the transport can without joining."""
    try:
        findings = list(assemble.transport_class(config).check(config.outer.transport))
    except UserError as error:
        findings = [Finding("fail", str(error))]
    return [Check("rendezvous", finding.status, finding.found, finding.advice) for finding in findings]


def _look(name: str, look: Callable[[], _Finding]) -> Check:
    try:
        return Check(name, *look())
    except UserError as error:
        return Check(name, "fail", str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Check(name, "fail", f"{where}{error.strerror or error}", "correct it, or choose another place")


def _run_folder(config: RunConfig, worker: int) -> _Finding:
    folder = Path(config.train.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"isthmus")
    if metrics_path(folder, worker).exists():
        return "warn", f"{folder} holds a run already", "go on with it by --resume, or choose another train.run_dir"
    return "ok", f"{folder} can be written", ""


def _disk(config: RunConfig) -> _Finding:
    model = outline(assemble.build_model_spec(config))
    state_bytes = _STATE_COPIES * sum(4 * parameter.numel() for parameter in model.parameters())
    kept = config.train.keep_checkpoints + 1  # one is being written
    needed = kept * state_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    folder = Path(config.train.run_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
    found = f"{readable_bytes(free)} free; checkpoints take up to {readable_bytes(needed)} on this machine"
    if free < needed:
        return "fail", found, "free some, lower train.keep_checkpoints, or choose another train.run_dir"
    return "ok", found, ""


def _data(config: RunConfig, worker: int) -> _Finding:
    data_set = assemble.open_data(config, assemble.build_model_spec(config))
    next(open_batches(data_set, config.train.seed, config.inner.batch_size, worker, config.train.workers))
    batches = data_set.validation(config.inner.batch_size, config.train.eval_batches * config.inner.batch_size)
    return "ok", f"training batches can be read, and {len(batches)} batches to evaluate", ""


def _host_name() -> _Finding:
    name = socket.gethostname()
    address = resolve(name, "add it to this machine's /etc/hosts, or to the name server")
    return "ok", f"{name} is {address}", ""
