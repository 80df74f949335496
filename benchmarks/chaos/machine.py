"""One machine of a run: a network namespace with a cable, a small disk, and a worker that is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.network import NETLAB, netlab
from isthmus.tools.fork_server import Child, ForkServer, end
from isthmus.transport.address import free_port

_CONFIG = str(Path(__file__).with_name("chaos.yaml"))
_DISK_MB = 64  # of every machine's checkpoints
_POLL_SECONDS = 0.1


class Machine:
    """A worker on a machine of its own, all of whose ranks start again when one dies, as under `isthmus launch`.

    That is: as forks of a process that has imported what they need, and stays.
    """

    def __init__(self, number: int, run_dir: Path, ranks: int, sets: list[str]) -> None:
        self._number, self.run_dir, self._ranks = number, run_dir, ranks
        self._sets = [*sets, f"train.run_dir={run_dir}", *([f"mesh.shard={ranks}"] if ranks > 1 else [])]
        self.disk = run_dir / "checkpoints"
        self.disk.mkdir(parents=True)
        self._stack = ExitStack()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(self.disk)], check=True)
        self._stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        self._server = self._stack.enter_context(_ForkServerOn(number))
        self._server.import_modules(["transformers.models.gpt_neox", "torch.distributed.tensor"])
        self._children: list[Child] = []
        self._lock = threading.Lock()  # the server answers one question at a time
        self._started = 0.0
        self.num_starts = 0

    def keep_running(self) -> None:
        """Start the worker if it does not run, and start it again when any of its ranks has ended."""
        with self._lock:
            if not self._children or any(child.poll() is not None for child in self._children):
                end(self._children)
                self._started, port = time.time(), free_port()
                self._children = [self._start(rank, port) for rank in range(self._ranks)]
                self.num_starts += 1

    def trains(self) -> bool:
        """Return whether the worker has taken a step since it was started."""
        steps = self.run_dir / "diary" / "steps.bin"
        with self._lock:
            alive = bool(self._children) and all(child.poll() is None for child in self._children)
        return alive and steps.exists() and steps.stat().st_mtime > self._started

    def signal(self, number: signal.Signals, rank: int = 0) -> None:
        """Send a signal to a rank of the worker, unless it is gone already."""
        with self._lock:
            if self._children[rank].poll() is None:
                os.kill(self._children[rank].pid, number)

    def unplug(self) -> None:
        """Pull the cable."""
        netlab("cut", str(self._number))

    def replug(self) -> None:
        """Put the cable back."""
        netlab("heal", str(self._number))

    def leave(self) -> None:
        """Tell the worker to leave."""
        self.replug()
        for rank in range(self._ranks):
            self.signal(signal.SIGCONT, rank)
            self.signal(signal.SIGTERM, rank)

    def close(self, deadline: float) -> None:
        """End the worker if it has not left by the deadline (`time.monotonic`), and take the machine down."""
        while time.monotonic() < deadline and any(child.poll() is None for child in self._children):
            time.sleep(_POLL_SECONDS)
        end(self._children)
        self._stack.close()

    def _start(self, rank: int, port: int) -> Child:
        """Start a rank; those of a worker meet at the port."""
        world = {"RANK": str(rank if self._ranks > 1 else self._number), "ISTHMUS_WORKER": str(self._number)}
        if self._ranks > 1:
            own = {"WORLD_SIZE": self._ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            world |= {name: str(value) for name, value in own.items()} | {"MASTER_PORT": str(port)}
        return self._server.start(
            [_CONFIG, *(word for value in self._sets for word in ("--set", value)), "--resume", "auto"],
            os.environ | world | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            self.run_dir / "log",
            f"worker-{self._number}",
            module="benchmarks.chaos.worker",
        )


class _ForkServerOn(ForkServer):
    """A fork server inside a machine's network namespace."""

    def __init__(self, machine: int) -> None:
        self._machine = machine

    def _start_process(self, connection: Connection) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "isthmus.tools.fork_server", str(connection.fileno())]
        return subprocess.Popen(
            [NETLAB, "exec", str(self._machine), *program],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
