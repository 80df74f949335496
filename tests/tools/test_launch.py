"""`isthmus launch` as its users meet it: real processes, real signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tests.launched import ROOT, RUN, all_gone, events, finish, wait_until, workers_of
from tests.program import Program

from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.launch import launch
from isthmus.tools.workers import world_environment


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(tmp_path / "run")}}))
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start `isthmus launch` with the given arguments; whatever still runs at the end is killed."""
    launchers = []

    def begin(*arguments: object, **environment: str) -> Program:
        launchers.append(Program("launch", *arguments, **environment))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def refused(config: Path, *overrides: str, workers: int = 2, resume: bool = False) -> str:
    """Return why a launch is refused, which has started no worker: its server is not even entered."""
    with pytest.raises(UserError) as error:
        launch(load_config(config, list(overrides), workers, resume), Console(), ForkServer(), resume)
    return str(error.value)


@pytest.mark.processes
def test_launch_trains_reports_and_joins(config, tmp_path):
    command = [sys.executable, "-m", "isthmus", "launch", str(config), "--set", "train.steps=40"]
    # a layer of the launcher's own configuration: its workers must not apply it a second time, above --set
    environment = os.environ | {"ISTHMUS_TRAIN__STEPS": "30"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == 40
    assert summary["num_syncs"] == 8
    assert len(set(summary["anchor_hash"].values())) == 1
    assert list(summary["anchor_hash"]) == ["worker-0", "worker-1"]
    assert (run / "report.png").stat().st_size > 10_000
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "metrics", "checkpoints", "logs"}
    assert "diloco: 2 workers, 40 steps" in out
    assert re.search(r"step 40/40  loss \d\.\d+  eval \d\.\d+  [\d,]+ tokens/s  8 syncs  .* sent  \d+% hidden", out)
    assert "\x1b" not in out
    assert f"{summary['eval_loss']:.3f}" in out

    said = refused(config, "train.steps=40")
    assert said == f"{run} holds a run already: go on with it by --resume, or choose another train.run_dir"


@pytest.mark.processes
def test_ctrl_c_saves_and_says_how_to_resume(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step", worker=1))
    pids = workers_of(launcher)
    launcher.send_signal(signal.SIGINT)
    code, out, err = finish(launcher)
    assert (code, err) == (75, "")
    assert "stopping: the workers finish their step" in out
    assert list(pids) == ["worker-0", "worker-1"]
    assert all_gone(pids.values())
    stopped = json.loads((run / "summary.json").read_text())
    assert not stopped["finished"]
    assert {path.name for path in (run / f"checkpoints/step-{stopped['steps']:08d}").iterdir()} == {
        "worker-0",
        "worker-1",
    }

    resume = re.search(r"go on with: isthmus launch (\S+) --resume", out)
    assert resume
    code, _, err = finish(start(resume[1], "--resume", "--set", f"train.steps={stopped['steps'] + 20}"))
    assert (code, err) == (0, "")
    steps = [event["step"] for event in events(run, "step")]
    assert steps == sorted(set(steps))
    assert steps[-1] == stopped["steps"] + 20


@pytest.mark.processes
def test_ctrl_c_before_training_began(config, start, tmp_path):
    launcher = start(config, "--set", "train.steps=1000000", "--workers", 1)
    wait_until(lambda: workers_of(launcher))
    launcher.send_signal(signal.SIGINT)
    code, out, err = finish(launcher)
    assert (code, err) == (75, "")
    assert "go on with" in out


@pytest.mark.processes
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_second_ctrl_c_ends_at_once(config, start, tmp_path, number, expected):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step"))
    pids = workers_of(launcher)
    os.kill(pids["worker-0"], signal.SIGSTOP)  # so that it cannot finish its step
    launcher.send_signal(number)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(number)
    code, _, err = finish(launcher)
    assert code == expected
    assert err.startswith("error: ended at once; ")
    assert all_gone(pids.values())


@pytest.mark.processes
def test_a_killed_worker_is_named_and_ends_the_run(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step", worker=1))
    pids = workers_of(launcher)
    os.kill(pids["worker-1"], signal.SIGKILL)
    code, _, err = finish(launcher)
    assert code == 1
    assert err.startswith("error: worker 1 was killed by SIGKILL; ")
    assert all_gone(pids.values())


@pytest.mark.processes
def test_workers_end_with_their_launcher(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step"))
    pids = workers_of(launcher)
    launcher.kill()
    wait_until(lambda: all_gone(pids.values()), within_seconds=5)


@pytest.mark.processes
def test_what_a_worker_finds_wrong_is_the_launchers_error(config, start, tmp_path):
    code, out, err = finish(start(config, "--set", "inner.batch_size=100000000", "--workers", 1))
    assert code == 2
    assert re.match(r"error: inner.batch_size is 100000000, and the data set has \d+ training samples: lower it", err)
    assert "step" in out


@pytest.mark.processes
def test_an_exception_is_named_and_not_what_was_printed_after_it(config, start, tmp_path):
    code, _, err = finish(start(config, "--set", "outer.compressor.type=tests.recipes.wrong_parts:Crash"))
    assert code == 1
    assert re.match(r"error: worker [01] failed: ValueError: a bug of my own; all of it: ", err)
    assert "a library says goodbye" in (tmp_path / "run/logs/worker-0.log").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "message"), [("data.source=./nowhere", "does not exist"), ("inner.optimizer.lr=nan", "finite")]
)
def test_what_is_known_before_is_said_before_any_worker_starts(config, tmp_path, override, message):
    assert message in refused(config, override)
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_finished_run_and_another_model_are_said_by_the_launcher(config, start, tmp_path):
    code, _, err = finish(start(config, "--set", "train.steps=10", "--workers", 1))
    assert (code, err) == (0, "")
    for overrides, message in (
        ((), f"{tmp_path}/run is finished after 10 steps: raise train.steps to train on"),
        (("model.arguments.hidden_size=8",), "model.arguments.hidden_size is 4 there and 8 here"),
    ):
        assert message in refused(config, "train.steps=10", *overrides, workers=1, resume=True)


@pytest.mark.processes
def test_auto_begins_goes_on_and_ends_well_where_it_is_finished(config, start, tmp_path):
    run, again = tmp_path / "run", (config, "--resume", "auto", "--set")
    launcher = start(*again, "train.steps=1000000")
    wait_until(lambda: events(run, "step", worker=1))
    launcher.send_signal(signal.SIGTERM)
    code, _, err = finish(launcher)
    assert (code, err) == (75, "")
    stopped = json.loads((run / "summary.json").read_text())["steps"]
    for text in (f"step {stopped + 40}/{stopped + 40}", f"{run} is finished after {stopped + 40} steps"):
        code, out, err = finish(start(*again, f"train.steps={stopped + 40}"))
        assert code == 0
        assert text in out + err
    steps = [event["step"] for event in events(run, "step")]
    assert steps == sorted(set(steps))
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # it need not meet anybody
    done = Program("train", *again, f"train.steps={stopped + 40}", **world)
    assert finish(done)[::2] == (0, f"{run} is finished after {stopped + 40} steps: raise train.steps to train on\n")


@pytest.mark.processes
def test_a_port_in_use_is_named(config, start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finish(start(config, MASTER_PORT=str(port)))
    assert code == 2
    assert err == f"error: port {port} is in use on this machine: set MASTER_PORT to a free one\n"


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr("isthmus.tools.workers.num_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {
        "TRAIN__STEPS": "3",
        "WORKER": "7",
        "WORKER_OFFSET": "8",
        "RUN_SECRET": "a secret of all workers",
    }.items():
        monkeypatch.setenv(f"ISTHMUS_{name}", value)
    world = world_environment(num_ranks=2)
    assert world["OMP_NUM_THREADS"] == "2"
    assert world["WORLD_SIZE"] == "2"
    assert "ISTHMUS_TRAIN__STEPS" not in world  # a layer of the configuration, which is final
    assert not {"ISTHMUS_WORKER", "ISTHMUS_WORKER_OFFSET"} & world.keys()
    assert world["ISTHMUS_ALLOW"] == os.environ["ISTHMUS_ALLOW"]
    assert world["ISTHMUS_RUN_SECRET"] == "a secret of all workers"
    for threads, expected in (("7", "7"), ("all", "2")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert world_environment(2)["OMP_NUM_THREADS"] == expected
