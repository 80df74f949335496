"""The server that is forked for every worker: its processes are `python -m isthmus`, and it knows how they ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launched import ROOT, wait_until

from isthmus.tools.fork_server import Child, ForkServer

pytestmark = pytest.mark.processes
WORLD = {name: value for name, value in os.environ.items() if name != "HOME"} | {"OMP_NUM_THREADS": "3", "SEEN": "here"}


@pytest.fixture(scope="module")
def server():
    with ForkServer() as each:
        yield each


@pytest.fixture
def probe(server, tmp_path):
    """A process that waits for a line while it builds its model."""
    child = server.start(["show", str(probing(tmp_path))], WORLD, tmp_path / "log", "worker-1-rank-234")
    yield child
    child.kill()
    child.close()


def probing(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text("model: {type: module, path: 'tests.tools.probe:Probe'}")
    return path


def told(log: Path) -> dict:
    """What a probe has written; waits for it."""
    wait_until(lambda: log.exists() and '"}' in log.read_text(), within_seconds=30)
    return json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))


def exit_code(child: Child) -> int | None:
    wait_until(lambda: child.poll() is not None, within_seconds=30)
    return child.returncode


def test_a_process_is_the_program_with_its_arguments_and_appends_to_its_log(server, tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    children = [server.start(words, WORLD, log, "some") for words in (["--help"], ["lunch"])]
    assert [exit_code(child) for child in children] == [0, 2]
    text = log.read_text()
    assert text.startswith("before\n")
    assert "Usage: " in text
    assert "error: No such command 'lunch'" in text
    assert "leaked" not in text  # what the server has imported for them ends with them
    for child in children:
        child.kill()  # nothing is left to end
        child.close()


def test_it_is_a_fork_with_the_environment_threads_name_and_group_that_it_is_given(probe, tmp_path):
    assert told(tmp_path / "log") == {
        "seen": "here",
        "home": None,
        "threads": 3,
        "leads_its_group": True,
        "name": "worker-1-rank-2",
        "program": "isthmus.tools.fork_server",
    }
    assert probe.poll() is None
    probe.tell(b"go on\n" * 2)  # for every time that it is built
    assert exit_code(probe) == 0
    probe.tell(b"too late\n")


def test_another_module_than_isthmus_may_be_the_program(server, tmp_path):
    child = server.start([], WORLD, tmp_path / "log", "some", module="this")
    assert exit_code(child) == 0
    child.close()
    assert "The Zen of Python" in (tmp_path / "log").read_text()


def test_it_sees_the_end_of_its_standard_input(server, tmp_path):
    child = server.start(["show", str(probing(tmp_path))], WORLD, tmp_path / "log", "some")
    other = server.start(["show", str(probing(tmp_path))], WORLD, tmp_path / "other", "some")
    os.close(child._stdin)
    assert exit_code(child) == 7  # though a fork that came later still runs
    assert other.poll() is None
    other.kill()
    assert exit_code(other) == -signal.SIGKILL
    other.close()


def test_modules_are_imported_once_and_those_that_are_absent_are_left_to_whoever_needs_them(server, tmp_path):
    server.import_modules(["no_such_module", "tests.tools.probe"])
    child = server.start(["--help"], WORLD, tmp_path / "log", "some")
    assert exit_code(child) == 0
    child.close()


def test_a_process_whose_server_has_other_threads_is_no_fork(tmp_path):
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        with ForkServer() as busy:
            busy.import_modules(["busy"])
            child = busy.start(["show", str(probing(tmp_path))], dict(os.environ) | WORLD, tmp_path / "log", "some")
            program = told(tmp_path / "log")["program"]
            child.tell(b"\n" * 2)
            assert exit_code(child) == 0
            child.close()
    assert program == "isthmus"


def test_it_ends_with_its_launcher_and_its_end_is_told():
    code = (
        "import time; from isthmus.tools.fork_server import ForkServer\n"
        "with ForkServer() as server: print(server._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        server = int(launcher.stdout.readline())
        launcher.kill()
    wait_until(lambda: not Path(f"/proc/{server}").exists())

    with ForkServer() as alone:
        os.kill(alone._process.pid, signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="the process that starts workers has ended with exit code -9"):
            alone.exit_codes()
