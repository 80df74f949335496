"""A real Slurm of two nodes on this machine: its four daemons, with ports, a key and folders of their own."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.deploy.helm import ROOT

from isthmus.transport.address import free_port

FOLDER = ROOT / "deploy/slurm"
_HOST = socket.gethostname().split(".")[0]
NODES = (_HOST, f"{_HOST}-twin")  # of the first one's name the batch files make an address
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_SYSTEM = "/usr/sbin:/sbin"  # where Debian has daemons, and not everybody's PATH has it
# Requeued jobs wait until the credentials of their former start have expired (cred_expire; by default 2 minutes).
_CONFIG = """
ClusterName=isthmus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
"""
_NODE = """
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=4000 Gres=gpu:8 Features=h100,a100
"""
_PARTITION = "PartitionName=all Nodes=ALL Default=YES State=UP\n"


class Slurm:
    """The commands of a user of this Slurm."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment, self.folder = environment, folder

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, file: str, *arguments: object, options: tuple[str, ...] = ()) -> str:
        """Submit one of the repository's batch files, with its log in the folder; return the number of its job."""
        where = f"--chdir={self.folder}"
        return self.run("sbatch", "--parsable", where, *options, str(FOLDER / file), *map(str, arguments))

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows about a job."""
        fields = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for(self, job: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait until a job is in one of these states; return what Slurm knows about it then."""
        deadline = time.monotonic() + seconds
        while (shown := self.show(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {shown['JobState']}, not {' or '.join(states)}"
            time.sleep(0.2)
        return shown


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm of two nodes, with all that it writes in a folder; skip the test where it is not installed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{_SYSTEM}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian has them in slurm-wlm and munge)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PATH": path, "SLURM_CONF": str(_write_files(folder)), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context(open(folder / f"{command[0]}.out", "a"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        files = (f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed"))
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        started = Slurm(environment, folder)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        _wait_for_nodes(started)
        stack.callback(_cancel_all, started)
        yield started


def _write_files(folder: Path) -> Path:
    """Write configuration and key; return the path of the former."""
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    text = _CONFIG.format(host=_HOST, port=free_port(), user=getpass.getuser(), folder=folder)
    for node in NODES:
        (folder / node).mkdir()
        text += _NODE.format(name=node, host=_HOST, port=free_port())
    (folder / "slurm.conf").write_text(text + _PARTITION)
    for gpu in range(8):
        (folder / f"gpu{gpu}").touch()  # Slurm only counts them
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    return folder / "slurm.conf"


def _wait_for_nodes(started: Slurm) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            states = started.run("sinfo", "--noheader", "--Node", "--format=%t").split()
        except AssertionError as error:
            states = [str(error)]
        if states == ["idle"] * len(NODES):
            return
        assert time.monotonic() < deadline, (states, (started.folder / "slurmctld.log").read_text()[-2000:])
        time.sleep(0.1)


def _cancel_all(started: Slurm) -> None:
    """Cancel what a failed test has left, and wait until it has ended."""
    started.run("scancel", "--user", getpass.getuser())
    deadline = time.monotonic() + 40
    while started.run("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.2)
