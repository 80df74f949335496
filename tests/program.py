"""The program `python -m isthmus` as a fork of a server that has imported what it needs: seconds sooner, and no less.

It is a process with signals, an environment and an end of its own. So is the server that it starts for its workers.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from tests.workers import CONTEXT

ROOT = Path(__file__).parents[1]


class Program:
    """`python -m isthmus` with these arguments: as much of `subprocess.Popen` as tests use."""

    def __init__(
        self, *arguments: object, cwd: Path = ROOT, inside: Callable[[], None] | None = None, **environment: str
    ) -> None:
        """Start it, in a folder, or wherever the process moves itself by calling `inside`."""
        self._outputs = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115
        names = [output.name for output in self._outputs]
        world = dict(os.environ) | environment
        self._process = CONTEXT.Process(
            target=_become, args=(list(map(str, arguments)), str(cwd), inside, world, names)
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def log(self) -> str:
        """Return what it has written to standard error so far."""
        return Path(self._outputs[1].name).read_text()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait until it has ended; what it wrote to standard output and standard error."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("isthmus", timeout)
        out, err = (Path(output.name).read_text() for output in self._outputs)
        return out, err


class _ForkedServer:
    """The server of a launcher's workers, a fork of the launcher: as much of `subprocess.Popen` as it uses."""

    def __init__(self, connection: Connection) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_to_its_end(lambda: _serve(connection.fileno()))
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _become(
    arguments: list[str],
    cwd: str,
    inside: Callable[[], None] | None,
    environment: dict[str, str],
    outputs: list[str],
) -> NoReturn:
    """Become the program: nothing is left of the tests but the modules."""
    from isthmus.__main__ import main

    for target, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, target)
        os.close(file)
    sys.argv = ["isthmus", *arguments]
    take_place(cwd, environment, inside)
    run_to_its_end(main)


def take_place(cwd: str, environment: dict[str, str], inside: Callable[[], None] | None = None) -> None:
    """Have this process look like a new one, whose server of workers is a fork of it; see `Program`."""
    from isthmus.tools.fork_server import ForkServer

    os.environ.clear()
    os.environ.update(environment)
    if inside is None:
        os.chdir(cwd)
    else:
        inside()
        cwd = os.getcwd()
    sys.path[:] = [cwd, *(path for path in sys.path if not path.startswith(f"{ROOT}/tests"))]
    multiprocessing.set_start_method(None, force=True)
    ForkServer._start_process = lambda self, connection: _ForkedServer(connection)


def _serve(connection: int) -> None:
    """Be `python -m isthmus.tools.fork_server`."""
    from isthmus.tools import fork_server

    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
    sys.argv = ["fork_server", str(connection)]
    fork_server.main()


def run_to_its_end(main: Callable[[], Any]) -> NoReturn:
    """Run a program, and end as Python does."""
    resource_tracker._resource_tracker._fd = None  # the tests' own
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
