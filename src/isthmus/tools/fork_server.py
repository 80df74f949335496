"""A started interpreter that is forked for every worker, so that what takes seconds to import is imported once.

`ForkServer` is the launcher's side. Run as a module, this file is the server: it answers requests to import modules,
to start `python -m isthmus` with arguments, and to tell which of these processes have ended. It is a program of its own
and no fork of the launcher, so when it forks it has no threads and has not touched a GPU.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol, Self

_FOR_EVERY_WORKER = ("isthmus.cli", "isthmus.train.worker", "torch._dynamo")  # optimizers import the last one
_POLL_SECONDS = 0.01
LOST = -255  # in the place of an exit code: the machine of a worker is away, and nobody knows


class WorkerProcess(Protocol):
    """A process of a worker, here or on another machine: as much of `subprocess.Popen` as a launcher needs."""

    @property
    def returncode(self) -> int | None:
        """The exit code when last looked, minus the signal's number for one that was killed."""

    def poll(self) -> int | None:
        """Return the exit code of now; None while the process runs."""

    def tell(self, message: bytes) -> None:
        """Write to the process's standard input, unless it has ended by itself."""

    def kill(self) -> None:
        """End the process at once, if it still runs."""

    def close(self) -> None:
        """Wait until the process has ended, and close its standard input."""


class WorkerServer(Protocol):
    """What starts processes `python -m isthmus`, on this machine or on another one."""

    def is_ready(self) -> bool:
        """Return whether it can start processes now."""

    def import_modules(self, names: Iterable[str]) -> None:
        """Have it import modules, those that are installed, before it starts anything."""

    def start(self, arguments: list[str], env: Mapping[str, str], log: Path, name: str) -> WorkerProcess:
        """Start `python -m isthmus` with these arguments and this environment; its output goes into the log."""


class Child:
    """A process that the server has started."""

    def __init__(self, server: ForkServer, pid: int, stdin: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._stdin = server, stdin

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number for one that was killed; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_codes().get(self.pid)
        return self.returncode

    def tell(self, message: bytes) -> None:
        """Write to the process's standard input, unless it has ended by itself."""
        with suppress(BrokenPipeError):
            os.write(self._stdin, message)

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process has ended, and close its standard input."""
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)
        os.close(self._stdin)


class ForkServer:
    """A context in which processes `python -m isthmus` start as forks of one that has imported what they need.

    Whoever leaves it has ended all processes before.
    """

    def __enter__(self) -> Self:
        """Start the server, which begins to import; nobody waits for it yet."""
        self._connection, theirs = Pipe()
        self._exit_codes: dict[int, int] = {}
        with theirs:
            self._process = self._start_process(theirs)
        return self

    def __exit__(self, *error: object) -> None:
        """End the server."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        """Return True: a request waits for whatever is still being imported."""
        return True

    def import_modules(self, names: Iterable[str]) -> None:
        """Have the server import modules, those that are installed, before it forks."""
        self._ask("import", list(names))

    def start(
        self, arguments: list[str], env: Mapping[str, str], log: Path, name: str, module: str = "isthmus"
    ) -> Child:
        """Start `python -m isthmus`, or another module, with these arguments, and with no environment but `env`.

        Its output is appended to the log; `ps -o comm` and `top` show its name.
        """
        read, write = os.pipe()
        request = {"module": module, "arguments": arguments, "env": dict(env), "log": str(log), "name": name}
        try:
            pid = self._ask("start", request, read)
        finally:
            os.close(read)
        self._exit_codes.pop(pid, None)  # of one that had the same number before
        return Child(self, pid, write)

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of all processes that have ended, by their pids."""
        self._exit_codes |= self._ask("poll")
        return self._exit_codes

    def _start_process(self, connection: Connection) -> subprocess.Popen[bytes]:
        """Start the server at the other end of the connection."""
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would be there when it forks
            process_group=0,  # the terminal's Ctrl-C reaches the launcher alone
        )

    def _ask(self, what: str, details: Any = None, stdin: int | None = None) -> Any:
        try:
            self._connection.send((what, details))
            if stdin is not None:
                send_handle(self._connection, stdin, self._process.pid)
            return self._connection.recv()
        except (OSError, EOFError):
            code = self._process.wait()
            raise RuntimeError(f"the process that starts workers has ended with exit code {code}") from None


def end(children: Sequence[WorkerProcess]) -> None:
    """End all of these processes that still run, at once."""
    for child in children:
        child.kill()
    for child in children:
        child.close()


def _import(names: Iterable[str]) -> None:
    gc.disable()  # it takes a tenth of the time, and finds nothing
    for name in names:
        with suppress(ImportError):  # whoever needs it says so in a better way
            importlib.import_module(name)
    gc.freeze()  # forks share the memory of what is there now: the collector would write into it
    gc.enable()


def _serve(connection: Connection) -> tuple[dict[str, Any], int] | None:
    """Answer requests; returns None when the launcher is gone, and in a new process its request and standard input."""
    _import(_FOR_EVERY_WORKER)
    while True:
        try:
            what, details = connection.recv()
        except (OSError, EOFError):
            return None
        answer: Any = None
        if what == "import":
            _import(details)
        elif what == "start":
            stdin, details["anew"] = recv_handle(connection), not _is_fit_to_fork()
            answer = os.fork()
            if answer == 0:
                return details, stdin
            os.close(stdin)
        else:
            answer = dict(_ended())
        connection.send(answer)


def _ended() -> Iterable[tuple[int, int]]:
    """Yield pid and exit code of every process that has ended since the last time."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _run(request: dict[str, Any], stdin: int) -> None:
    """Become `python -m MODULE`: with a log, an environment and a process group of its own."""
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["anew"]:
        os.execve(sys.executable, [sys.executable, "-m", request["module"], *request["arguments"]], os.environ)
    Path("/proc/self/comm").write_text(request["name"][:15])
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read the server's environment
    atexit.register(gc.unfreeze)  # else libraries find at the end that their objects have leaked, and say so
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _is_fit_to_fork() -> bool:
    """Return whether a fork of this process works like a new one: on Linux, where no other thread is running."""
    tasks = Path("/proc/self/task")
    return sys.platform == "linux" and len(list(tasks.iterdir())) == 1


def main() -> None:
    """Serve the launcher at the other end of the connection whose number is the argument."""
    with Connection(int(sys.argv[1])) as connection:
        new_process = _serve(connection)
    if new_process:
        _run(*new_process)


if __name__ == "__main__":
    main()
