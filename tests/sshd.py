"""Real ssh servers on loopback, each a host for `isthmus launch --hosts`, with keys of the test's own.

The Python of these hosts hands its standard streams over to the tests, which have imported what its agents need.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest

from tests.launched import wait_until
from tests.program import run_to_its_end, take_place
from tests.workers import CONTEXT

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
_CLONE_NEWNS = 0x20000
_PYTHON = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as tests:
    tests.connect(sys.argv[1])
    socket.send_fds(tests, [json.dumps([os.getpid(), os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    sys.exit(int(tests.recv(16)))
"""


class SshHosts:
    """Servers at 127.0.0.1 and 127.0.0.2; on the second one, for root, a folder is another one than here."""

    def __init__(self, folder: Path, other_folder: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / name], check=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        ssh = f"exec {shutil.which('ssh')} -i {folder}/user -o UserKnownHostsFile={folder}/known"
        self.script("ssh", f'{ssh} "$@"')
        self._apart = other_folder is not None and os.geteuid() == 0
        self.names, self._servers, self.agents = [], [], []
        (self.bin / "python.py").write_text(_PYTHON)
        self.python = self.script("python", f"exec {sys.executable} -SE {self.bin}/python.py {folder}/socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "socket"))
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        for number in (1, 2):
            self._serve(f"127.0.0.{number}", other_folder if number == 2 and self._apart else None)

    def script(self, name: str, command: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
        return path

    def _serve(self, address: str, other_folder: Path | None) -> None:
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        options = {
            "ListenAddress": address,
            "Port": port,
            "PidFile": "none",
            "AuthorizedKeysFile": self.folder / "user.pub",
            "StrictModes": "no",
            "UsePAM": "no",
        }
        command = [str(SSHD), "-De", "-f", "/dev/null", "-h", str(self.folder / "host")]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        if other_folder is not None:
            there = other_folder.with_name(f"{other_folder.name}-there")
            for path in (other_folder, there):
                path.mkdir(exist_ok=True)
            command = ["unshare", "-m", "sh", "-c", f'mount --bind {there} {other_folder} && exec "$@"', "sh", *command]
        self._servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        self.names.append(f"{address}:{port}")
        key = (self.folder / "host.pub").read_text()
        with (self.folder / "known").open("a") as known:
            known.write(f"[{address}]:{port} {key}")
        wait_until(lambda: _listens(address, port))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._be_agent, args=self._socket.accept()[:1], daemon=True).start()

    def _be_agent(self, asks: socket.socket) -> None:
        with asks:
            told, streams, _, _ = socket.recv_fds(asks, 1 << 16, 3)
            held = [Connection(stream) for stream in streams]
            process = CONTEXT.Process(target=_agent, args=(held, *json.loads(told)))
            process.start()
            for stream in held:
                stream.close()
            self.agents.append(process)
            process.join()
            with suppress(OSError):
                asks.send(str(process.exitcode).encode())

    def processes(self) -> list[int]:
        """The processes that run on the hosts, beside the servers."""
        found = [server.pid for server in self._servers]
        for pid in found:  # grows meanwhile
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, path.read_text().split())
        return found[len(self._servers) :]

    def close(self) -> None:
        self._socket.close()
        for server in self._servers:
            server.kill()
            server.wait()


@pytest.fixture
def ssh_hosts(tmp_path):
    """Two hosts; on the second one the folder `run` is another one."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH is not installed: apt-get install openssh-server openssh-client")
    hosts = SshHosts(tmp_path / "ssh", tmp_path / "run")
    yield hosts
    try:
        wait_until(lambda: not hosts.processes(), within_seconds=20)  # whatever the test did, nothing stays
    finally:
        hosts.close()


def _agent(streams: list[Connection], caller: int, cwd: str, environment: dict[str, str]) -> NoReturn:
    """Be `python -m isthmus.tools.host_agent` for a process of a host, in the folders that it sees."""
    from isthmus.tools import host_agent

    for target, stream in enumerate(streams):
        os.dup2(stream.fileno(), target)
        stream.close()
    with open(f"/proc/{caller}/ns/mnt") as folders:
        if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).setns(folders.fileno(), _CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the folders of a host")
    sys.argv = ["host_agent"]
    take_place(cwd, environment)
    run_to_its_end(host_agent.main)


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0
