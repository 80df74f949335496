"""Machines on one machine: network namespaces with shaped cables, small disks, a worker on each; the meeting place."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.network import NETLAB, netlab

CONFIG = str(Path(__file__).with_name("chaos.yaml"))
MBIT = 100  # of every cable
DISK_MB = 64  # of every machine's checkpoints
_START_SECONDS = 120.0


class World:
    """The machines of one run; a worker that dies is started again at once, as `isthmus launch` does.

    Args:
        engine: "torchft" or "hivemind".
        folder: of the run; what it holds is deleted.
        workers: how many.
        ranks: of each, which a torchrun starts; a fault of a worker strikes one of them.
        round_trip_ms: between two machines.
    """

    def __init__(self, engine: str, folder: Path, workers: int = 4, ranks: int = 1, round_trip_ms: float = 0) -> None:
        self.engine, self.folder, self.num_workers, self.ranks = engine, folder, workers, ranks
        self._link = [str(MBIT), *([f"{round_trip_ms:g}"] if round_trip_ms else [])]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self._started: dict[int, float] = {}
        self.num_restarts = 0
        self._stopping = False
        self._starting = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        """Lay the cables, mount the disks, start everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        netlab("up", str(self.num_workers + 1), *self._link)
        for worker in range(self.num_workers):
            disk = self.disk(worker)
            disk.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=True)
        self._sets = [f"outer.transport={self._open_meeting_place()}"]
        self._processes = [self._start(worker) for worker in range(self.num_workers)]
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the workers leave, then take everything down."""
        self._stopping = True
        self._keeper.join()
        for worker in range(self.num_workers):
            self.replug(worker)
        for worker, process in enumerate(self._processes):
            for pid in self._pids(worker):
                os.kill(pid, signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self._place.send_signal(signal.SIGTERM)  # a shell in the background has it ignore Ctrl-C
        self._place.wait()
        for worker in range(self.num_workers):
            subprocess.run(["umount", "-l", str(self.disk(worker))], check=False)
        netlab("down")
        for log in self._logs:
            log.close()

    def run_dir(self, worker: int) -> Path:
        """A worker's folder."""
        return self.folder / f"worker-{worker}"

    def disk(self, worker: int) -> Path:
        """Where a worker's small disk is mounted."""
        return self.run_dir(worker) / "checkpoints"

    def training(self) -> list[int]:
        """Workers that have begun to train since they were started; waits until there are some."""
        while not (found := [worker for worker in range(self.num_workers) if self._trains(worker)]):
            time.sleep(0.1)
        return found

    def wait_for_all(self) -> None:
        """Until all workers train, each since it was started last."""
        deadline = time.monotonic() + _START_SECONDS
        while len(self.training()) < self.num_workers:
            if time.monotonic() > deadline:
                raise SystemExit(f"not all workers train after {_START_SECONDS:g} s: see {self.folder}/worker-*/log")
            time.sleep(0.1)

    def signal(self, worker: int, number: signal.Signals, rank: int = 0) -> None:
        """Send a signal to a rank of a worker."""
        with self._starting:
            pids = self._pids(worker)
            if rank < len(pids):  # else it is gone already
                os.kill(pids[rank], number)

    def _pids(self, worker: int) -> list[int]:
        """Of its ranks."""
        leader = self._processes[worker]
        if self.ranks == 1:
            return [leader.pid] if leader.poll() is None else []
        try:
            children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
        except FileNotFoundError:
            return []
        return [int(pid) for pid in children]

    def unplug(self, worker: int) -> None:
        """Pull a worker's cable."""
        netlab("cut", str(worker))

    def replug(self, worker: int) -> None:
        """Put it back."""
        netlab("heal", str(worker))

    def _trains(self, worker: int) -> bool:
        steps = self.run_dir(worker) / "diary" / "steps.bin"
        alive = self._processes[worker].poll() is None
        return alive and steps.exists() and steps.stat().st_mtime > self._started[worker]

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

    def _start(self, worker: int) -> subprocess.Popen[bytes]:
        run_dir = self.run_dir(worker)
        sets = [*self._sets, f"train.run_dir={run_dir}"]
        if self.engine == "hivemind":
            sets += [f"outer.transport.identity_folder={run_dir}/identity"]
        start = ["torch.distributed.run", "--nproc-per-node", str(self.ranks), "-m"] if self.ranks > 1 else []
        command = [NETLAB, "exec", str(worker), sys.executable, "-m", *start, "benchmarks.chaos.worker", CONFIG]
        if self.ranks > 1:
            sets += [f"mesh.shard={self.ranks}"]
        for value in sets:
            command += ["--set", value]
        if (run_dir / "metrics" / f"worker-{worker}.jsonl").exists():
            command += ["--resume"]
        self._started[worker] = time.time()
        self._logs.append((run_dir / "log").open("ab"))
        number = {"RANK": str(worker), "ISTHMUS_WORKER": str(worker)}
        environment = os.environ | number | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return subprocess.Popen(command, stdout=self._logs[-1], stderr=subprocess.STDOUT, env=environment)

    def _keep(self) -> None:
        """Start the dead again."""
        while not self._stopping:
            for worker, process in enumerate(self._processes):
                if process.poll() is not None:
                    with self._starting:
                        self._processes[worker] = self._start(worker)
                        self.num_restarts += 1
            time.sleep(0.1)
