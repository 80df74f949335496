"""One other machine, reached by ssh: it starts the processes of workers as the fork server does on this machine."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from isthmus.core import UserError
from isthmus.tools.fork_server import LOST
from isthmus.tools.mirror import write_part
from isthmus.transport.address import split_address

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")  # more than `host_agent.SILENCE_SECONDS`
_BEAT_SECONDS = 5.0
_AGAIN_SECONDS = 10.0  # between two calls of a host that is away
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F]*(:[0-9a-fA-F.]*){2,}(%\w+)?")  # a name or address; one of IPv6
_NO_FOLDER, _NO_PYTHON, _SSH_FAILED = 91, 92, 255


@dataclass(frozen=True)
class SshAddress:
    """A host as ssh is told it: [user@]host, and a port where ssh's own configuration has none."""

    destination: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read user@host:port, of which user and port may be missing; an IPv6 address with a port is in brackets."""
        user, at, host = text.rpartition("@")
        port = None
        if re.search(r"\]:\d+$|^[^:]+:\d+$", host):
            host, port = split_address(host)
        if not _HOST.fullmatch(host) or text.startswith("-") or re.search(r"\s", user):
            raise UserError(
                f"--hosts: {text!r} is no host: write host, user@host or user@host:port, with commas between"
            )
        return cls(f"{user}{at}{host}", port)

    def __str__(self) -> str:
        """Return it as people write it."""
        return self.destination if self.port is None else f"{self.destination}:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of ssh that name it."""
        return [*([] if self.port is None else ["-p", str(self.port)]), "--", self.destination]

    def hostname(self) -> str:
        """Return the name behind an alias of ssh's configuration, or the name itself."""
        try:
            told = subprocess.run(["ssh", "-G", *self.arguments], capture_output=True, text=True, check=False).stdout
        except FileNotFoundError:
            raise UserError("there is no ssh on this machine: install OpenSSH's client") from None
        names = re.findall(r"^hostname (\S+)$", told, re.MULTILINE)
        return names[0] if names else self.destination.rpartition("@")[2]


class HostProcess:
    """A process on another machine."""

    def __init__(self, host: Host, number: int) -> None:
        self._host, self._number = host, number

    @property
    def returncode(self) -> int | None:
        """The exit code, `LOST` where nobody knows."""
        return self._host.exit_codes.get(self._number)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.returncode

    def tell(self, message: bytes) -> None:
        """Write to the process's standard input, unless it has ended."""
        self._request({"tell": self._number, "message": message.decode()})

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._request({"kill": self._number})

    def close(self) -> None:
        """Wait until the process has ended; who cannot be heard ends by itself."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.returncode is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _request(self, request: dict[str, Any]) -> None:
        if self.returncode is None:
            self._host.send(request)


class Host:
    """A machine with an agent, connected by ssh; when the connection has broken it is called again.

    Args:
        address: of the machine.
        python: the interpreter there.
        run: what the agent is told first.
        tell: is given lines about the connection.
    """

    def __init__(self, address: SshAddress, python: str, run: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.address, self.exit_codes = address, dict[int, int]()
        self._python, self._run, self._tell = python, run, tell
        self._logs: dict[int, Path] = {}  # of all processes that were started
        self._numbers = itertools.count()
        self._ready: dict[str, Any] | None = None
        self._why_lost = ""  # and not empty while it is
        self._called_at = 0.0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        """Call the machine, and do not wait."""
        self._call()
        threading.Thread(target=self._beat, name="isthmus-host-alive", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Have the agent end, and all that it has started."""
        self._closed.set()
        with suppress(OSError):
            self._input.close()
        try:
            self._ssh.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
        self._reader.join(_CLOSE_SECONDS)

    def wait_until_ready(self) -> dict[str, Any]:
        """Return what the agent says of its machine.

        Raises:
            UserError: it has none, or cannot be reached.
        """
        while self._ready is None:
            if self._why_lost:
                raise UserError(self._why_lost)
            time.sleep(_POLL_SECONDS)
        self._run["port"] = self._ready["port"]  # called again it has to be found where it was
        return self._ready

    def is_ready(self) -> bool:
        """Return whether it is connected; call it again from time to time where it is not."""
        if self._why_lost and time.monotonic() - self._called_at > _AGAIN_SECONDS:
            self._ssh.wait()
            self._call()
        return self._ready is not None

    def import_modules(self, names: Iterable[str]) -> None:
        """Have modules imported before anything is started."""
        self.send({"import": list(names)})

    def start(self, arguments: list[str], env: Mapping[str, str], log: Path, name: str) -> HostProcess:
        """Start `python -m isthmus` there."""
        number = next(self._numbers)
        self._logs[number] = log
        self.send({"start": number, "arguments": arguments, "env": dict(env), "log": str(log), "name": name})
        return HostProcess(self, number)

    def send(self, request: dict[str, Any] | None) -> None:
        """Send a request; None only says that this process lives."""
        line = b"" if request is None else json.dumps(request).encode()
        with suppress(OSError, ValueError):  # whoever reads says that the connection broke
            self._input.write(line + b"\n")
            self._input.flush()

    def _call(self) -> None:
        self._called_at, self._ready, self._why_lost = time.monotonic(), None, ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.environ.get("PYTHONPATH")
        python = shlex.quote(self._python)
        script = (
            f"cd {shlex.quote(os.getcwd())} || exit {_NO_FOLDER}; command -v {python} >/dev/null || exit {_NO_PYTHON}; "
            f"exec {f'env PYTHONPATH={shlex.quote(path)} ' if path else ''}{python} -m isthmus.tools.host_agent"
        )
        self._ssh = subprocess.Popen(
            ["ssh", *_OPTIONS, *_ALIVE, *self.address.arguments, f"exec sh -c {shlex.quote(script)}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            process_group=0,  # the terminal's Ctrl-C reaches the launcher alone
        )
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        self._input: IO[bytes] = self._ssh.stdin
        self.send(self._run)
        self._reader = threading.Thread(target=self._read, args=(self._ssh.stdout,), name="isthmus-host", daemon=True)
        self._reader.start()

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            self.send(None)

    def _read(self, answers: IO[bytes]) -> None:
        """Take what the agent tells until the connection has ended."""
        refused = ""
        with answers:
            try:
                for line in answers:
                    if line.startswith(b"{"):  # else a greeting of the machine
                        refused = self._take(json.loads(line))
            except (OSError, ValueError) as error:
                refused = f"what it tells cannot be kept here ({error})"
                self._ssh.kill()
        code = self._ssh.wait()
        if not self._closed.is_set():
            self._lose(refused or self._reason(code))

    def _take(self, answer: dict[str, Any]) -> str:
        """Take what the agent tells; return why it cannot do its work, if it says so."""
        match answer:
            case {"ready": ready}:
                self._ready = ready
            case {"ended": int(number), "code": int(code)}:
                self.exit_codes[number] = code
            case {"file": _}:
                write_part(Path(self._run["run_dir"]), self._run["workers"], answer)
            case {"refused": why}:
                return str(why)
        return ""

    def _lose(self, why: str) -> None:
        was_there = self._ready is not None
        line = f"host {self.address}: {why}"
        for number, log in self._logs.items():
            if number not in self.exit_codes:
                with log.open("a") as file:
                    file.write(f"error: {line}\n")
                self.exit_codes[number] = LOST
        self._ready, self._why_lost = None, line
        if was_there and self._logs:
            self._tell(f"{line}; it is called again every {_AGAIN_SECONDS:.0f} s while others train")

    def _reason(self, code: int) -> str:
        """Return why the connection has ended, and what to do."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        if code == _NO_FOLDER:
            return f"there is no folder {os.getcwd()}: make it, or launch in one that all hosts have"
        if code == _NO_PYTHON:
            return f"there is no {self._python}: name its Python by --python"
        if code != _SSH_FAILED and "No module named" in lines[-1]:
            if "host_agent" in lines[-1] and "'isthmus'" not in lines[-1]:
                return "it has another isthmus: install the same version"
            return f"{self._python} has no isthmus there: install it, or name another Python by --python"
        if self._ready is not None:
            return f"the connection broke ({lines[-1]})"
        if code == _SSH_FAILED:
            return f"ssh cannot connect ({lines[-1]}): try ssh {' '.join(self.address.arguments)}"
        return f"it cannot run workers ({lines[-1]})"
