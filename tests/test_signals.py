"""Signals that come before training, at any moment from the first on, and what PID 1 owes: real processes, as started.

Forks that have imported everything (`tests.program`) would be past the moments that matter here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from isthmus.signals import handled_by
from isthmus.transport.address import free_port
from tests.launched import ROOT, RUN, events, wait_until

pytestmark = pytest.mark.processes

ISTHMUS = [sys.executable, "-m", "isthmus"]
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
Start = Callable[..., subprocess.Popen[str]]
own_pids = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="unshare --pid is not permitted here",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    train = RUN["train"] | {"run_dir": str(tmp_path / "run"), "steps": 1_000_000, "workers": 1}
    path.write_text(yaml.safe_dump(RUN | {"train": train}))
    return path


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(*command: object, **environment: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*map(str, command)], cwd=ROOT, env=os.environ | environment, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("command", ["train", "launch"])
def test_before_anything_is_imported_a_signal_ends_it(config, start, tmp_path, command, number, code):
    process = start(*ISTHMUS, command, config)
    wait_until(lambda: catches(process.pid, signal.SIGTERM))
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert out == ""
    assert err == ("ended at once by SIGTERM: there was nothing to save\n" if number == signal.SIGTERM else "")
    assert not (tmp_path / "run").exists()


IN_CALLBACK = """
import signal, weakref
from isthmus.signals import heed_signals
heed_signals()
class Told: pass
told = Told()
{told}
del told
print("it went on")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    "told",
    [
        "reference = weakref.ref(told, lambda _: signal.raise_signal({number}))",
        "Told.__del__ = lambda _: signal.raise_signal({number})",
    ],
)
def test_a_signal_in_a_callback_that_swallows_exceptions_ends_it_too(start, told, number, code):
    process = start(sys.executable, "-c", IN_CALLBACK.format(told=told.format(number=int(number))))
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert out == ""
    assert err == ("ended at once by SIGTERM: there was nothing to save\n" if number == signal.SIGTERM else "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_one_that_waits_for_the_others_in_vain_is_ended_too(config, start, tmp_path, number, code):
    port = free_port()
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = start(*ISTHMUS, "train", config, "--set", "train.workers=2", **world)
    listening = f"0100007F:{port:04X} 00000000:0000 0A"
    wait_until(lambda: listening in Path("/proc/net/tcp").read_text())
    time.sleep(0.5)  # it waits in C++ by now
    begun = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - begun < 10  # not the ten sync budgets that it would wait


def test_while_it_trains_a_signal_stops_it_and_a_second_one_ends_it(config, start, tmp_path):
    process = start(*ISTHMUS, "train", config)
    wait_until(lambda: events(tmp_path / "run", "step"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "go on with: isthmus train" in err.splitlines()[-1]


@own_pids
@pytest.mark.parametrize("training", [False, True])
def test_as_pid_1_it_heeds_sigterm(config, start, tmp_path, training):
    outside = start(*NAMESPACE, *ISTHMUS, "train", config)
    wait_until(lambda: children(outside.pid) and len(children(children(outside.pid)[0])) == 1)  # it has forked
    if training:
        wait_until(lambda: events(tmp_path / "run", "step"))
    os.kill(children(outside.pid)[0], signal.SIGTERM)
    _, err = outside.communicate(timeout=60)
    assert outside.returncode == 75
    assert ("stopped after step" in err) == training


@own_pids
def test_as_pid_1_it_tells_how_the_program_ended(config, start, tmp_path):
    outside = start(*NAMESPACE, *ISTHMUS, "train", tmp_path / "nowhere.yaml")
    _, err = outside.communicate(timeout=60)
    assert (outside.returncode, err.count("\n")) == (2, 1)


@own_pids
def test_as_pid_1_a_launcher_leaves_no_zombies(config, start, tmp_path):
    model = RUN["model"] | {"path": "tests.train.tiny:WithOrphan"}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"model": model}))
    outside = start(*NAMESPACE, *ISTHMUS, "launch", config)
    wait_until(lambda: events(tmp_path / "run", "step"))
    (first,) = children(outside.pid)
    time.sleep(1.0)  # the orphan has ended
    assert "\tZ " not in "".join(Path(f"/proc/{pid}/status").read_text() for pid in children(first))
    assert len(children(first)) == 1
    os.kill(first, signal.SIGTERM)
    out, _ = outside.communicate(timeout=60)
    assert outside.returncode == 75
    assert "stopped; go on with" in out


def test_handlers_are_as_before_afterwards_and_signals_meanwhile_are_not_taken_for_later_ones():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    before, received = signal.getsignal(signal.SIGTERM), []
    wakeup = signal.set_wakeup_fd(writer)
    try:
        with handled_by(lambda number, frame: received.append(number)):
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.set_wakeup_fd(writer) == writer
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)
