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
from tests.launched import ROOT, RUN, events, finish, wait_until, worker_pids

from isthmus.recipes import load_config
from isthmus.tools.launch import Workers
from isthmus.tools.progress import LiveProgress, Seen


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(tmp_path / "run")}}))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `isthmus launch` with the given arguments; whatever still runs at the end is killed."""
    launchers = []

    def begin(*arguments: object, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "isthmus", "launch", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        launchers.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **pipes))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def test_launch_trains_reports_and_joins(config, start, tmp_path):
    # a layer of the launcher's own configuration: its workers must not apply it a second time, above --set
    code, out, err = finish(start(config, "--set", "train.steps=40", ISTHMUS_TRAIN__STEPS="30"))
    assert (code, err) == (0, "")
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

    code, _, err = finish(start(config, "--set", "train.steps=40"))
    assert code == 2
    assert err == f"error: {run} holds a run already: go on with it by --resume, or choose another train.run_dir\n"


def test_ctrl_c_saves_and_says_how_to_resume(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step", worker=1))
    launcher.send_signal(signal.SIGINT)
    code, out, err = finish(launcher)
    assert (code, err) == (0, "")
    assert "stopping: the workers finish their step" in out
    assert not worker_pids(run)
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


def test_ctrl_c_before_training_began(config, start, tmp_path):
    launcher = start(config, "--set", "train.steps=1000000", "--workers", 1)
    wait_until(lambda: worker_pids(tmp_path / "run"))
    launcher.send_signal(signal.SIGINT)
    code, out, err = finish(launcher)
    assert (code, err) == (0, "")
    assert "go on with" in out


def test_a_second_ctrl_c_ends_at_once(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step"))
    pids = worker_pids(run)
    os.kill(pids[0], signal.SIGSTOP)  # so that it cannot finish its step
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    code, _, err = finish(launcher)
    assert code == 130
    assert err.startswith("error: ended at once; ")
    assert not worker_pids(run)


def test_a_killed_worker_is_named_and_ends_the_run(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step", worker=1))
    victim = next(pid for pid in worker_pids(run) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    code, _, err = finish(launcher)
    assert code == 1
    assert err.startswith("error: worker 1 was killed by SIGKILL; ")
    assert not worker_pids(run)


def test_workers_end_with_their_launcher(config, start, tmp_path):
    launcher, run = start(config, "--set", "train.steps=1000000"), tmp_path / "run"
    wait_until(lambda: events(run, "step"))
    launcher.kill()
    wait_until(lambda: not worker_pids(run), within_seconds=5)


def test_what_a_worker_finds_wrong_is_the_launchers_error(config, start, tmp_path):
    code, out, err = finish(start(config, "--set", "data.source=nowhere", "--workers", 1))
    assert code == 2
    assert err == "error: data: 'nowhere' does not exist; give a file, a folder or stdlib\n"
    assert "step" in out


def test_a_port_in_use_is_named(config, start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finish(start(config, MASTER_PORT=str(port)))
    assert code == 2
    assert err == f"error: port {port} is in use on this machine: set MASTER_PORT to a free one\n"


def test_cores_are_shared_out(config, monkeypatch):
    monkeypatch.setattr("isthmus.tools.launch.num_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ISTHMUS_TRAIN__STEPS", "3")
    world = Workers(load_config(config), resume=False)._world()
    assert world["OMP_NUM_THREADS"] == "2"
    assert world["WORLD_SIZE"] == "2"
    assert "ISTHMUS_TRAIN__STEPS" not in world
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert Workers(load_config(config), resume=False)._world()["OMP_NUM_THREADS"] == "7"


def step(number: int, loss: float = 2.0) -> str:
    return json.dumps({"event": "step", "step": number, "loss": loss, "tokens": 100 * number, "seconds": number}) + "\n"


def test_progress_reads_what_is_complete_and_begins_anew_when_the_file_is_cut(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    seen = Seen(path)
    assert seen.look() == []
    path.write_text(step(1) + step(2)[:10])
    seen.look()
    assert seen.step == 1
    path.write_text(step(1) + step(2) + '{"event": "fault", "step": 2, "reason": "lost"}\n')
    assert seen.look() == ["step 2: lost"]
    assert seen.step == 2
    assert seen.look() == []
    path.write_text(step(1, loss=5.0))
    seen.look()
    assert (seen.step, seen.loss) == (1, 5.0)


def test_progress_on_a_terminal_and_off_it(tmp_path):
    (tmp_path / "metrics").mkdir()
    sync = {"event": "sync", "outer_step": 0, "fragment": "all", "sent_bytes": 2500, "seconds": 2, "hidden_seconds": 1}
    for worker in (0, 1):
        (tmp_path / f"metrics/worker-{worker}.jsonl").write_text(step(10) + json.dumps(sync) + "\n")
    texts = []
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=120)
        with console.capture() as captured, LiveProgress(tmp_path, "diloco", 2, 20, console):
            pass
        texts.append(captured.get())
    assert texts[0] == "diloco  step 10/20  loss 2.000  200 tokens/s  1 syncs  2.5 kB sent  50% hidden\n"
    assert "10/20" in texts[1]
    assert "50% hidden" in texts[1]
