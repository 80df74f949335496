"""Files for SkyPilot and dstack, read by their own parsers, and what they start, read by isthmus.

Both have dependencies of their own: they are taken from wherever `sky` and `dstack` are on PATH.
"""

import json
import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from tests.deploy.helm import ROOT

from isthmus.recipes import load_config

SKY, DSTACK = ROOT / "deploy/sky", ROOT / "deploy/dstack/worker.dstack.yml"
_READ = {
    "sky": """
import json, sky, sys, yaml
given = [("ISTHMUS_WORKER", "1"), ("MEETING_PLACE", "203.0.113.7"), ("BUCKET", "s3://isthmus-runs")]
config = yaml.safe_load(sys.stdin)
given = [each for each in given if each[0] in config.get("envs", {})]
task = sky.Task.from_yaml_config(config, given, [("ISTHMUS_RUN_SECRET", "x")])
print(json.dumps(task.to_yaml_config()))
""",
    "dstack": """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
print(parse_apply_configuration(yaml.safe_load(sys.stdin)).json())
""",
}


def read_by(tool, text, home):
    """Return what a tool's own parser makes of a file; skip the test where the tool is not installed."""
    if (found := shutil.which(tool)) is None:
        pytest.skip(f"{tool} is not on PATH")
    python = Path(found).resolve().parent / "python"
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run(
        [python, "-c", _READ[tool]], input=text, env=environment, capture_output=True, text=True, timeout=120
    )


def settings(line, tmp_path):
    """Return the configuration of the `isthmus train` in a shell's line."""
    words = line.replace("\\\n", " ").replace("$MEETING_PLACE", "203.0.113.7").split()
    overrides = [word for before, word in pairwise(words) if before == "--set"]
    assert words[words.index("train") : words.index("train") + 4] == ["train", "run.yaml", "--resume", "auto"]
    return load_config(ROOT / "examples/tiny.yaml", overrides, workers=3)


def test_a_worker_of_sky_is_a_managed_spot_job_that_comes_back(tmp_path):
    text = (SKY / "worker.yaml").read_text()
    done = read_by("sky", text, tmp_path)
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    resources = task["resources"]
    alternatives = resources.get("any_of") or resources.get("ordered") or [resources]
    for each in [resources | one for one in alternatives]:
        assert each["use_spot"]
        assert each["job_recovery"]["recover_on_exit_codes"] == [75, 1]
        assert each["ports"] == ["29540"]
    assert task["file_mounts"]["/checkpoints"]["mode"] == "MOUNT_CACHED"
    refused = read_by("sky", text.replace("recover_on_exit_codes: [75, 1]", "recover_on_exit_codes: [275]"), tmp_path)
    assert "275" in refused.stderr
    assert refused.returncode != 0


def test_the_lighthouse_of_sky_opens_its_ports(tmp_path):
    text = (SKY / "lighthouse.yaml").read_text()
    done = read_by("sky", text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["resources"]["ports"] == ["29510", "29530"]
    refused = read_by("sky", text.replace("use_spot", "use_spots"), tmp_path)
    assert "use_spots" in refused.stderr
    assert refused.returncode != 0


def test_a_worker_of_dstack_is_a_spot_task_that_comes_back(tmp_path):
    text = DSTACK.read_text()
    done = read_by("dstack", text, tmp_path)
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert (task["type"], task["spot_policy"], task["stop_duration"]) == ("task", "spot", 180)
    assert sorted(task["retry"]["on_events"]) == ["error", "interruption", "no-capacity"]
    refused = read_by("dstack", text.replace("spot_policy", "spot_polici"), tmp_path)
    assert "spot_polici" in refused.stderr
    assert refused.returncode != 0


def test_their_workers_meet_at_the_lighthouse(tmp_path):
    run = yaml.safe_load((SKY / "worker.yaml").read_text())["run"]
    (command,) = yaml.safe_load(DSTACK.read_text())["commands"]
    for line in (run.replace("$(curl -fsS https://checkip.amazonaws.com)", "203.0.113.9"), command):
        transport = settings(line, tmp_path).outer.transport
        assert transport["lighthouse"] == "203.0.113.7:29510"
        assert transport["via"] == "203.0.113.7:29530"


STUBS = {  # in the place of what the task's shell calls
    "pip": "",
    "sleep": "exit 1",
    "aws": 'echo "aws $*" >> log; case "$*" in *$FAILS*) exit 5;; esac',
    "isthmus": 'trap "exit 75" TERM; echo train >> log; while test $CODE = wait; do /bin/sleep 0.05; done; exit $CODE',
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "fails", "uploads"), [("0", "none", 1), ("2", "none", 1), ("5", "mine/worker-1 r", 0)]
)
def test_the_shell_of_dstack_ends_as_the_worker_does_and_saves(code, fails, uploads, tmp_path):
    shell = start_shell(tmp_path, CODE=code, FAILS=fails)
    assert shell.wait(30) == int(code)
    said = (tmp_path / "log").read_text().splitlines()
    assert "s3://mine/worker-1 runs/last" in said[0]
    assert sum(line.endswith("--delete runs/last s3://mine/worker-1") for line in said) == uploads
    assert said.count("train") == uploads  # without the checkpoint of before nothing begins, and nothing is overwritten


@pytest.mark.processes
def test_the_shell_of_dstack_hands_on_that_it_shall_stop(tmp_path):
    shell = start_shell(tmp_path, CODE="wait", FAILS="none")
    while not (tmp_path / "log").exists() or "train" not in (tmp_path / "log").read_text():
        time.sleep(0.02)
    time.sleep(0.1)
    shell.terminate()
    assert shell.wait(30) == 75
    assert "--delete runs/last" in (tmp_path / "log").read_text()


def start_shell(folder, **environment):
    """Start the commands of dstack's task with stubs in the place of what they call."""
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment |= {"BUCKET": "s3://mine", "ISTHMUS_WORKER": "1", "PATH": f"{folder}:/usr/bin:/bin"}
    (command,) = yaml.safe_load(DSTACK.read_text())["commands"]
    return subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment)
