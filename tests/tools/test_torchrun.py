"""The exit codes of a worker of several ranks, with the real torchrun."""

import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.waits]

RANK = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (Path(f"stopped-{sys.argv[2]}").touch(), sys.exit(75)))
Path("begun").touch()
if sys.argv[1] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


def start(folder, asked):
    (folder / "rank.py").write_text(RANK)
    program = [sys.executable, "-m", "isthmus.tools.torchrun", "--standalone", "--nproc-per-node=1"]
    return subprocess.Popen([*program, "rank.py", asked, "0"], cwd=folder, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("code", [2, 75])
def test_it_ends_with_the_code_of_its_rank(tmp_path, code):
    assert start(tmp_path, str(code)).wait(60) == code


def test_on_sigterm_it_waits_for_its_ranks_and_is_to_be_continued(tmp_path):
    running = start(tmp_path, "wait")
    while not (tmp_path / "begun").exists():
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 75
    assert (tmp_path / "stopped-0").exists()
