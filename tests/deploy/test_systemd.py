"""The units for systemd: it understands every line, and restarts by the exit codes that isthmus documents."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.helm import ROOT

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def test_systemd_understands_every_line(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    binaries = str(Path(sys.executable).parent)
    for unit in UNITS:  # it looks for the program, too
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/local/lib/isthmus/bin", binaries))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_restart_what_can_go_on(unit):
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str
    read.read(unit)
    service = read["Service"]
    assert service["RestartPreventExitStatus"] == "2"
    if "worker" in unit.name:
        assert service["Restart"] == "on-failure"
        assert service["RestartForceExitStatus"] == service["SuccessExitStatus"] == "75"
    else:
        assert service["Restart"] == "always"
