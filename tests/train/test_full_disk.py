"""A disk that is full while a run writes to it: the run goes on, says so, and keeps its last good checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_trainer import at_step
from toy_runs import toy_config
from worker_processes import CONTEXT, events, run, said, summary, write_to

from isthmus.config import dump
from isthmus.train.checkpoint import Checkpoints, NotSaved
from isthmus.train.metrics import MetricsFile
from isthmus.train.trainer import Trainer
from isthmus.train.worker import train
from isthmus.transport.torchft.lighthouse import lighthouse

WIDE = ("model.arguments.width=64",)  # a checkpoint takes some 200 kB
ELASTIC = ("outer.transport={type: torchft, sync_budget_seconds: 10}", "outer.split=whole")


class Disk:
    """A disk of 1 MB."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.filler = folder, folder / "filler"

    def fill(self, spare_bytes: int = 0) -> None:
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.room() - spare_bytes)

    def free(self) -> None:
        self.filler.unlink()

    def grow(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=8m", self.folder], check=True)

    def room(self) -> int:
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(params=["static", "elastic"])
def config(request, tmp_path, disk):
    """Makes the configuration of a run onto that disk."""
    place = f"train.run_dir={disk.folder / 'run'}"
    if request.param == "static":
        yield lambda *overrides: toy_config(tmp_path, *WIDE, place, *overrides)
    else:
        with lighthouse("127.0.0.1:0") as port:
            address = f"outer.transport.lighthouse=127.0.0.1:{port}"
            yield lambda *overrides: toy_config(tmp_path, *WIDE, place, *ELASTIC, address, *overrides)


def folders(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir / "checkpoints")) for path in run_dir.glob("checkpoints/*/*"))


def test_training_goes_on_and_the_next_checkpoint_is_written_when_there_is_room(config, disk, monkeypatch, logged):
    run_dir, seen = disk.folder / "run", []
    with monkeypatch.context() as patch:
        at_step(patch, 10, lambda trainer: disk.fill(spare_bytes=1 << 16))
        at_step(patch, 13, lambda trainer: (seen.append(folders(run_dir)), disk.free()))
        part = train(config("train.steps=20"))
    assert part["finished"]
    assert [line for line in events(run_dir, 0, "fault") if "step 10 cannot be written" in line["reason"]] == [
        {
            "event": "fault",
            "step": 10,
            "reason": f"the checkpoint of step 10 cannot be written to {run_dir}/checkpoints "
            "(No space left on device): make room there",
        }
    ]
    line = "training goes on, and the next checkpoint is tried when it is due"
    assert sum(line in message for message in logged.messages) == 1
    assert seen[0][-1] == "step-00000005/worker-0"
    assert [name[:13] for name in folders(run_dir)[-3:]] == ["step-00000005", "step-00000015", "step-00000020"]


def test_the_last_checkpoint_is_an_error_and_the_summary_is_written(config, disk, monkeypatch):
    at_step(monkeypatch, 9, lambda trainer: disk.fill(spare_bytes=1 << 16))
    with pytest.raises(NotSaved, match=r"checkpoint of step 12 cannot be written .*\(No space left on device\)"):
        train(config())
    assert summary(disk.folder / "run")["finished"]
    assert folders(disk.folder / "run")[-1] == "step-00000005/worker-0"
    disk.free()
    monkeypatch.undo()
    train(config(), resume=True)
    assert folders(disk.folder / "run")[-1] == "step-00000012/worker-0"


def _fill_before_step_7(arguments: list[str], disk: Disk, log: Path) -> None:
    """A process `isthmus ...` whose disk gets full."""
    from isthmus import cli

    write_to(log)
    train_step = Trainer._train_step

    def disturbed(trainer: Trainer) -> None:
        if trainer.totals.steps == 6:
            disk.fill()
        train_step(trainer)

    Trainer._train_step = disturbed
    sys.argv = ["isthmus", *arguments]
    cli.main()


@pytest.mark.processes
def test_without_any_room_at_all_it_is_one_line(disk, tmp_path):
    """As a process: exit code and words, where neither metrics nor summary fit."""
    run_dir, log, path = disk.folder / "run", tmp_path / "log.txt", tmp_path / "run.yaml"
    config = toy_config(tmp_path, *WIDE, f"train.run_dir={run_dir}", "train.steps=60")
    path.write_text(yaml.safe_dump(dump(config)))
    process = CONTEXT.Process(target=_fill_before_step_7, args=(["train", str(path)], disk, log))
    process.start()
    process.join(60)
    lines = [line for line in log.read_text().splitlines() if not line.startswith("step ")]
    assert process.exitcode == 1, lines
    assert lines[-1] == (
        f"error: the checkpoint of step 60 cannot be written to {run_dir}/checkpoints (No space left on device): "
        "make room there"
    )
    assert sum("metrics/worker-0.jsonl cannot be written (" in line for line in lines) == 1
    assert "Traceback" not in log.read_text()
    assert folders(run_dir)[-1] == "step-00000005/worker-0"
    assert not list(run_dir.rglob("*.tmp"))
    for line in (run_dir / "metrics/worker-0.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.processes
def test_workers_keep_a_checkpoint_that_all_of_them_have(disk, tmp_path):
    """Worker 1's disk holds the first (400 kB), but not the next (900 kB) beside it. Both go on from the first."""
    (tmp_path / "1").symlink_to(disk.folder)
    run_dirs, again = [tmp_path / "0/run", tmp_path / "1/run"], ["train.keep_checkpoints=1"]
    run(tmp_path / "{rank}/run", *again)
    assert said(run_dirs[1], 1).count("training goes on") == 4
    assert folders(run_dirs[1]) == ["step-00000000/worker-1"]
    assert folders(run_dirs[0])[0] == "step-00000000/worker-0"
    disk.grow()
    assert run(tmp_path / "{rank}/run", *again, resume=True) == [0, 0]
    assert folders(run_dirs[1])[-1] == "step-00000030/worker-1"


def test_events_wait_for_room(disk, logged):
    path = disk.folder / "metrics.jsonl"
    metrics = MetricsFile(path)
    disk.fill(spare_bytes=4096)
    for number in range(100):
        metrics.write("step", step=number, text="x" * 90)
    written = path.read_text()
    assert written.endswith("}\n")
    assert metrics.size_bytes == len(written) < 4096
    assert len(logged.messages) == 1
    assert "cannot be written (" in logged.messages[0]
    disk.free()
    metrics.write("step", step=100)
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(101))


def test_a_half_written_checkpoint_leaves_nothing(disk):
    checkpoints = Checkpoints(disk.folder / "checkpoints", 0, {})
    checkpoints.save(1, {"a": torch.ones(50_000)})
    with pytest.raises(NotSaved, match=r"checkpoint of step 2 .* \(No space left on device\): make room there"):
        checkpoints.save(2, {"a": torch.ones(250_000)})
    assert folders(disk.folder) == ["step-00000001/worker-0"]
    assert not (disk.folder / "checkpoints/step-00000002").exists()
    assert checkpoints.usable() == [1]
