"""What a worker can see alone: its folder, data, names and ports."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.data import open_batches
from isthmus.tools.doctor.check import Check, Status
from isthmus.tools.report import readable_bytes
from isthmus.train import assemble
from isthmus.train.folder import metrics_path
from isthmus.transport.address import split_address

_STATE_COPIES = 6  # at most: parameters, anchor, outer momentum, compressor memory, AdamW's two moments
_Finding = tuple[Status, str, str]


def look_around(config: RunConfig, worker: int) -> list[Check]:
    """All checks that need nobody else."""
    looks: dict[str, Callable[[], _Finding]] = {
        "run folder": lambda: _run_folder(config, worker),
        "disk": lambda: _disk(config),
        "data": lambda: _data(config, worker),
        "host name": lambda: _host_name(config),
        "rendezvous": lambda: _rendezvous(config, worker),
    }
    return [_look(name, look) for name, look in looks.items()]


def data_fingerprint(config: RunConfig) -> str:
    """Of the samples and their order, which workers of an elastic run share."""
    try:
        data_set = assemble.open_data(config, assemble.build_model_spec(config))
        return data_set.sample_order(config.train.seed).fingerprint
    except UserError:
        return "unreadable"  # the check of the data says why


def _look(name: str, look: Callable[[], _Finding]) -> Check:
    try:
        return Check(name, *look())
    except UserError as error:
        return Check(name, "fail", str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Check(name, "fail", f"{where}{error.strerror or error}", "mend it, or choose another place")


def _run_folder(config: RunConfig, worker: int) -> _Finding:
    folder = Path(config.train.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"isthmus")
    if metrics_path(folder, worker).exists():
        return "warn", f"{folder} holds a run already", "go on with it by --resume, or choose another train.run_dir"
    return "ok", f"{folder} can be written", ""


def _disk(config: RunConfig) -> _Finding:
    model = assemble.build_model_spec(config).build(config.train.seed)
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


def _host_name(config: RunConfig) -> _Finding:
    name = socket.gethostname()
    address = _resolve(name, "add it to this machine's /etc/hosts, or to the name server")
    static = config.outer.transport["type"] == "torch_dist" and "MASTER_ADDR" in os.environ
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if static and not chosen and _is_loopback(address) and not _is_loopback(_resolve(os.environ["MASTER_ADDR"])):
        how = "set GLOO_SOCKET_IFNAME to the interface the others reach, or mend /etc/hosts"
        return "warn", f"{name} is {address}: gloo would listen where no other machine can reach it", how
    return "ok", f"{name} is {address}" + (f"; gloo uses {chosen}" if chosen else ""), ""


def _rendezvous(config: RunConfig, worker: int) -> _Finding:
    """Whether the place where workers meet has an address, and, where this worker holds it, a free port."""
    transport = config.outer.transport
    match transport["type"]:
        case "torchft":
            host, port = split_address(transport["lighthouse"])
            return "ok", f"lighthouse at {_resolve(host, 'correct outer.transport.lighthouse')}, port {port}", ""
        case "hivemind" if not transport["initial_peers"] and worker:
            return (
                "fail",
                "no initial peers",
                "start isthmus dht, and give its address in outer.transport.initial_peers",
            )
        case "hivemind":
            return "ok", ", ".join(transport["initial_peers"]) or "this worker is the first peer", ""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return "ok", "none: one worker", ""  # or a launcher that says too little: the meeting tells
    address, port = _resolve(os.environ["MASTER_ADDR"], "correct MASTER_ADDR"), int(os.environ["MASTER_PORT"])
    if worker == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _listen(port)
    return "ok", f"worker-0 at {address}, port {port}", ""


def _listen(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise UserError(
                f"this machine cannot listen on port {port} ({error.strerror}): set MASTER_PORT to a free one"
            ) from error


def _resolve(name: str, advice: str = "correct it") -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        raise UserError(f"the name {name} has no address ({error.strerror}): {advice}") from error


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
