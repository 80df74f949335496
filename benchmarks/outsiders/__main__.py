"""The longest sync of a run whose every port is attacked, beside the longest of one that is left alone.

    python -m benchmarks.outsiders [--seconds 8] [--only NAME] [--write]

Two workers on this machine, over a static world and over torchft, whose keys are on a list. Each attack lasts so long;
after it the same time is left to the run. A worker that ends, anchors that differ and bytes read are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGINT
from typing import Any

import yaml
from torch.distributed import TCPStore

from benchmarks.outsiders import attacks
from benchmarks.outsiders.attacks import Address, Attack
from benchmarks.results import write
from isthmus.link import Identity
from isthmus.transport.address import free_port
from isthmus.transport.torchft.lighthouse import lighthouse

WORKERS = ("worker-0", "worker-1")
HUGE = {"told": "x" * 1_000_000, "key": "y", "signature": "z"}
FOREIGN: list[Any] = [{}, {"told": 1}, HUGE, {"version": 10**9, "links": [], "contacts": []}, None]


class Run:
    """Two workers that train until they are stopped."""

    def __init__(self, folder: Path, transport: dict[str, Any], port: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run_dir = folder, folder / "run"
        self.identity, self.revoked = Identity.generate(), Identity.generate()
        self.identity.save(folder / "worker.key")
        self.trusted = folder / "trusted.txt"
        self.trusted.write_text(f"{self.identity.fingerprint}\n{self.revoked.fingerprint}\n")
        keys = {"identity": str(folder / "worker.key"), "trusted": str(self.trusted)}
        base = yaml.safe_load(Path("examples/tiny.yaml").read_text())
        base["outer"] |= {"schedule": {"local_steps": 2, "warm_start_steps": 0}, "hash_every": 1}
        base["outer"]["transport"] = transport | keys | {"sync_budget_seconds": 20}
        never = {"eval_every": 0, "checkpoint_every": 0}
        base["train"] = {"steps": 1_000_000, "workers": 2, "run_dir": str(self.run_dir), "log_every": 50} | never
        (folder / "run.yaml").write_text(yaml.safe_dump(base))
        self.log = folder / "launch.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isthmus", "launch", str(folder / "run.yaml")],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"MASTER_PORT": str(port)},
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of both workers."""
        paths = [self.run_dir / f"metrics/{name}.jsonl" for name in WORKERS]
        lines = [line for path in paths if path.exists() for line in path.read_text().splitlines(keepends=True)]
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def ports(self) -> list[int]:
        """Return where the workers listen, other than for torch's store."""
        names, ports = self._sockets(), []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in names:
                    ports.append(int(fields[1].rpartition(":")[2], 16))
        return ports

    def _sockets(self) -> set[str]:
        found = set()
        for comm in Path("/proc").glob("[0-9]*/comm"):
            try:
                if comm.read_text().strip() in WORKERS and f"{self.folder}" in _command_line(comm.parent):
                    found |= {os.readlink(path) for path in (comm.parent / "fd").iterdir()}
            except OSError:
                continue
        return found

    def wait(self, num_syncs: int = 20) -> None:
        """Wait until so many more syncs have been reported."""
        before, end = len(self.events("sync")), time.monotonic() + 120
        while len(self.events("sync")) < before + num_syncs:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"the run does not go on: see {self.log}")
            time.sleep(0.1)

    def stop(self) -> int:
        """Stop the run as Ctrl-C does; return its exit code."""
        self.process.send_signal(SIGINT)
        return self.process.wait(60)


def _command_line(process: Path) -> str:
    """Return what a worker, a fork, was given: its arguments stand in what its output goes to."""
    return os.readlink(process / "fd/1")


def at_the_store(address: Address, seconds: float) -> int:
    """Write junk under every key of torch's store, and delete what is there."""
    from datetime import timedelta

    store, end = TCPStore(*address, is_master=False, timeout=timedelta(seconds=2)), time.monotonic() + seconds
    while time.monotonic() < end:
        keys = store.list_keys()
        prefix = next((key.split("isthmus/")[0] for key in keys if "isthmus/" in key), "")
        for key in {*keys, *(f"{prefix}isthmus/{n}/{name}" for n in range(4) for name in ("stop", "stop/0"))}:
            store.set(key, "7")
        time.sleep(0.2)
        for key in keys:
            store.delete_key(key)
    return 0


def on_the_link(run: Run, addresses: list[Address]) -> dict[str, Attack]:
    """Return the attacks on the ports of workers, of which those of gloo inside a worker answer nobody."""
    stranger, workers, recorded = Identity.generate(), [run.identity.fingerprint], b""
    for address in addresses:
        with suppress(OSError):
            recorded = attacks.record(run.identity, workers, address)
    return {
        "64 silent connections": attacks.silent(64),
        "1,000 silent connections": attacks.silent(1000),
        "junk": attacks.junk,
        "giant lengths": attacks.giant_lengths,
        "half a handshake, a byte a second": attacks.slow_handshake,
        "a worker's recorded bytes": attacks.replay(recorded),
        "a key that is not on the list": attacks.with_key(stranger, workers),
        "a key that was revoked": attacks.with_key(run.revoked, workers),
        "TLS 1.2": attacks.with_key(stranger, workers, ssl.TLSVersion.TLSv1_2),
        "a member gone bad: wrong hellos": attacks.bad_member(run.identity, workers),
    }


def at_the_meeting_place(kind: str) -> dict[str, Attack]:
    """Return the attacks on what no key guards: torch's store, or the lighthouse."""
    if kind == "torch_dist":
        return {"all keys of the store": at_the_store}
    return {
        "others' names at the lighthouse": attacks.at_the_lighthouse(list(WORKERS), FOREIGN, kill=True),
        "strangers at the lighthouse": attacks.at_the_lighthouse([f"stranger-{n}" for n in range(50)], FOREIGN),
        "1,000 members that never come": attacks.fake_members(1000),
    }


def longest(run: Run, attack: Attack | None, addresses: list[Address], seconds: float) -> tuple[float, int, int]:
    """Return the longest sync that ended during an attack or right after it, how many did, and the bytes read."""
    before, num_bytes = len(run.events("sync")), 0
    if attack is None:
        time.sleep(seconds)
    else:
        with ThreadPoolExecutor(len(addresses)) as pool:
            num_bytes = sum(pool.map(lambda address: attack(address, seconds), addresses))
    during = len(run.events("sync")) - before
    run.wait()
    events = sorted(run.events("sync"), key=lambda event: event["outer_step"])[before:]
    return max(event["seconds"] for event in events), during, num_bytes


@contextmanager
def started(kind: str, folder: Path) -> Iterator[tuple[Run, Address]]:
    """Start a run; yield it with the address of its meeting place."""
    with lighthouse("127.0.0.1:0", grace_seconds=5.0) as lighthouse_port:
        port = free_port()
        meeting = ("127.0.0.1", port if kind == "torch_dist" else lighthouse_port)
        options = {} if kind == "torch_dist" else {"lighthouse": f"127.0.0.1:{lighthouse_port}"}
        run = Run(folder / kind, {"type": kind, **options}, port)
        try:
            run.wait()
            yield run, meeting
        finally:
            run.process.kill()


def measure(kind: str, folder: Path, seconds: float, only: str) -> list[list[str]]:
    """Return a row for every attack on a run of this transport."""
    rows = []
    with started(kind, folder) as (run, meeting):
        ports = [("127.0.0.1", port) for port in run.ports() if port != meeting[1]]
        link_attacks = on_the_link(run, ports)
        run.trusted.write_text(f"{run.identity.fingerprint}\n")
        chosen: dict[str, Attack | None] = {"nothing": None, **link_attacks, **at_the_meeting_place(kind)}
        for name, attack in chosen.items():
            if only in name or name == "nothing":
                addresses = ports if name in link_attacks else [meeting]
                most, during, num_bytes = longest(run, attack, addresses, seconds)
                drifts = sum("differ" in event.get("reason", "") for event in run.events("sync"))
                rows.append([kind, name, f"{most:.2f}", str(during), str(num_bytes), str(drifts)])
                print("  ".join(rows[-1]), flush=True)
        code, restarts = run.stop(), run.log.read_text().count("started again")
        rows.append([kind, f"in the end: exit code {code}, {restarts} workers ended", "", "", "", ""])
        print(rows[-1][1], flush=True)
    return rows


def main() -> None:
    """Attack both kinds of runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = Path("runs/outsiders").absolute() / time.strftime("%H%M%S")
    rows = [row for kind in ("torch_dist", "torchft") for row in measure(kind, folder, options.seconds, options.only)]
    if options.write:
        columns = ["transport", "attack", "longest sync, s", "syncs meanwhile", "bytes read", "drifts"]
        notes = [
            "two workers and the attackers on one machine, which share its cores: only the longest sync is compared",
            "bytes read: under TLS, or in the clear; a handshake does not count",
        ]
        write("outsiders", "Those who reach every port of a run", columns, rows, notes, rows)


if __name__ == "__main__":
    main()
