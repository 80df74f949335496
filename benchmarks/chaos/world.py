"""Machines on one machine: network namespaces with shaped cables, small disks, a worker on each; the meeting place."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.chaos.machine import Machine
from benchmarks.network import NETLAB, netlab

MBIT = 100  # of every cable
_START_SECONDS = 120.0
_LEAVE_SECONDS = 60.0


class World:
    """The machines of one run; a worker that dies is started again at once.

    Args:
        engine: "torchft" or "hivemind".
        folder: of the run; what it holds is deleted.
        workers: how many.
        ranks: of each; a fault of a worker strikes one of them.
        round_trip_ms: between two machines.
    """

    def __init__(self, engine: str, folder: Path, workers: int = 4, ranks: int = 1, round_trip_ms: float = 0) -> None:
        self.engine, self.folder, self.num_workers, self.ranks = engine, folder, workers, ranks
        self._link = [str(MBIT), *([f"{round_trip_ms:g}"] if round_trip_ms else [])]
        self.machines: list[Machine] = []
        self._stopping = False
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    @property
    def num_restarts(self) -> int:
        """How often workers were started again."""
        return sum(machine.num_starts - 1 for machine in self.machines)

    def __enter__(self) -> Self:
        """Lay the cables, mount the disks, start everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        netlab("up", str(self.num_workers + 1), *self._link)
        transport = self._open_meeting_place()
        for worker in range(self.num_workers):
            run_dir = self.folder / f"worker-{worker}"
            own = [f"outer.transport.identity_folder={run_dir}/identity"] if self.engine == "hivemind" else []
            self.machines.append(Machine(worker, run_dir, self.ranks, [f"outer.transport={transport}", *own]))
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the workers leave, then take everything down."""
        self._stopping = True
        self._keeper.join()
        for machine in self.machines:
            machine.leave()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for machine in self.machines:
            machine.close(deadline)
        self._place.send_signal(signal.SIGTERM)  # a shell in the background has it ignore Ctrl-C
        self._place.wait()
        netlab("down")

    def training(self) -> list[int]:
        """Workers that have begun to train since they were started; waits until there are some."""
        while not (found := [worker for worker, machine in enumerate(self.machines) if machine.trains()]):
            time.sleep(0.1)
        return found

    def wait_for_all(self) -> None:
        """Until all workers train, each since it was started last."""
        deadline = time.monotonic() + _START_SECONDS
        while len(self.training()) < self.num_workers:
            if time.monotonic() > deadline:
                raise SystemExit(f"not all workers train after {_START_SECONDS:g} s: see {self.folder}/worker-*/log")
            time.sleep(0.1)

    def _open_meeting_place(self) -> str:
        """A lighthouse or a first peer on a machine of its own; returns what the workers need to know."""
        host = self.num_workers
        address = f"10.77.0.{10 + host}"
        common = "min_workers: 3, sync_budget_seconds: 15"
        if self.engine == "torchft":
            command = ["lighthouse", "--bind", f"{address}:29510", "--host", address, "--grace-seconds", "3"]
        else:
            key = self.folder / "first-peer.key"
            command = ["dht", "--listen", f"/ip4/{address}/tcp/29520", "--identity", str(key)]
        self._place = subprocess.Popen(
            [NETLAB, "exec", str(host), sys.executable, "-m", "isthmus", *command], stdout=subprocess.PIPE, text=True
        )
        assert self._place.stdout is not None
        if self.engine == "torchft":
            self._place.stdout.readline()
            return f"{{type: torchft, lighthouse: '{address}:29510', {common}}}"
        found = re.search(rf"/ip4/{address}/tcp/29520/p2p/\w+", self._place.stdout.readline())
        assert found is not None
        return f"{{type: hivemind, initial_peers: ['{found[0]}'], grace_seconds: 3, {common}}}"

    def _keep(self) -> None:
        """Start the workers, and the dead again."""
        while not self._stopping:
            for machine in self.machines:
                machine.keep_running()
            time.sleep(0.1)
