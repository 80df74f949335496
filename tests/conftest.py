"""Options and settings shared by all tests, and the rule behind `make quick`."""

import atexit
import gc
import logging
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

gc.disable()  # until all test modules are imported: it would take a tenth of that time, and find nothing
torch.set_num_threads(1)
# a shell without job control has what it starts in the background ignore Ctrl-C, and whatever that starts, too
signal.signal(signal.SIGINT, signal.default_int_handler)

# what the tests' configurations may name, here and in other processes; pytest imports files by their bare names, too
_ALLOWED = ("tests", "torch.nn", "torch.optim", *(path.stem for path in Path(__file__).parent.rglob("*.py")))
os.environ["ISTHMUS_ALLOW"] = ",".join(_ALLOWED)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for a GPU run on the CPU

# these end within a moment: no process is meant
TOOLS = (
    "c++",
    "espeak-ng",
    "git",
    "hadolint",
    "helm",
    "ldconfig",
    "mount",
    "promtool",
    "shellcheck",
    "ssh-keygen",
    "systemd-analyze",
    "umount",
)
_started: list[str] = []  # by the test that runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden traces anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait, for other processes or for clocks: the others fill the time that is left."""
    items.sort(key=lambda item: (not item.get_closest_marker("processes"), not item.get_closest_marker("waits")))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: nobody need look at it again
    atexit.register(gc.unfreeze)  # else libraries find at the end that it has leaked, and say so
    gc.enable()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What isthmus logs in this process; `logged.messages` has the lines."""
    caplog.set_level(logging.INFO, "isthmus")
    return caplog


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Fail a test that starts a process without the marker `processes`, by which `make quick` leaves it out."""
    report = yield
    quick = "not processes" in item.config.getoption("markexpr")
    if _started and report.passed and quick and not item.get_closest_marker("processes"):
        report.outcome = "failed"
        report.longrepr = f"mark this test with `processes`: it started {_started[0]}"
        _started.clear()
    return report


def _note_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started.append(event)
    elif event == "subprocess.Popen" and Path(arguments[0] or arguments[1][0]).name not in TOOLS:
        _started.append(str(arguments[1]))


def _note_start(process: multiprocessing.process.BaseProcess) -> None:
    _started.append(str(process))  # the interpreter tells its hooks nothing of these
    _start(process)


_start = multiprocessing.process.BaseProcess.start
multiprocessing.process.BaseProcess.start = _note_start
sys.addaudithook(_note_process)
