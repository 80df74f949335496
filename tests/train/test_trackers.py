"""Trackers see what the metrics file sees, cannot slow a run down, and cannot end it."""

import json
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from test_prometheus import free_ports
from test_trainer import at_step
from toy_runs import toy_config
from worker_processes import events

from isthmus.core import UserError
from isthmus.train.assemble import config_hash
from isthmus.train.metrics import Totals
from isthmus.train.trackers.base import Trackers, numbers
from isthmus.train.worker import train

SYNC = {"step": 4, "fragment": "all", "committed": True, "norm": 0.5, "reason": "", "left_out": {}}


class Diary:
    """Keeps what it is told."""

    def __init__(self, name: str = "diary") -> None:
        self.name, self.told = name, []

    def begin(self, step: int, totals: Totals) -> None:
        self.told.append(("begin", step))

    def take(self, event: str, values: dict) -> None:
        self.told.append((event, values["step"]))

    def close(self) -> None:
        self.told.append(("close", None))


class Broken(Diary):
    """Fails at the second step."""

    def take(self, event: str, values: dict) -> None:
        super().take(event, values)
        if values["step"] == 2:
            raise OSError(28, "No space left on device")


class Stuck(Diary):
    """Hangs in its first event until it is let go."""

    def __init__(self) -> None:
        super().__init__("stuck")
        self.go = Event()

    def take(self, event: str, values: dict) -> None:
        assert self.go.wait(60)
        super().take(event, values)


def test_one_that_fails_is_named_once_and_the_others_go_on(logged):
    broken, diary = Broken("broken"), Diary()
    with Trackers([broken, diary]) as trackers:
        trackers.begin(0, Totals())
        for step in range(1, 5):
            trackers.take("step", {"step": step})
    line = "broken failed ([Errno 28] No space left on device): it gets no more events, training goes on"
    assert logged.messages == [line]
    assert broken.told == [("begin", 0), ("step", 1), ("step", 2), ("close", None)]
    assert diary.told == [("begin", 0), *(("step", step) for step in range(1, 5)), ("close", None)]


def test_one_that_hangs_delays_nobody_and_costs_a_bounded_amount_of_memory(logged):
    stuck = Stuck()
    with Trackers([stuck]) as trackers:
        begin = time.monotonic()
        for step in range(12_000):
            trackers.take("step", {"step": step})
        assert time.monotonic() - begin < 5
        assert logged.messages == ["the trackers are slower than training: some events are in the metrics file only"]
        stuck.go.set()
    steps = [step for event, step in stuck.told if event == "step"]
    assert steps == list(range(len(steps)))
    assert 10_000 <= len(steps) <= 10_001


def test_the_numbers_of_an_event():
    assert numbers("sync", SYNC) == {"sync/all/committed": 1.0, "sync/all/norm": 0.5}
    assert numbers("step", {"step": 3, "loss": 2.0, "tokens": 7}) == {"train/loss": 2.0, "train/tokens": 7.0}
    assert numbers("eval", {"step": 3, "loss": 2.0, "accuracy": 0.5, "of": "anchor"}) == {
        "eval/loss": 2.0,
        "eval/accuracy": 0.5,
    }
    assert numbers("fault", {"step": 3, "reason": "lost"}) == {}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def told(run_dir: Path, kind: str, value: str) -> list[tuple[int, float]]:
    return [(event["step"], pytest.approx(event[value], rel=1e-6)) for event in events(run_dir, 0, kind)]


def test_tensorboard_shows_what_the_metrics_file_holds_also_of_a_run_that_was_resumed(tmp_path):
    config, run_dir = toy_config(tmp_path, "track.tensorboard=true"), tmp_path / "run"
    train(config)
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    shutil.rmtree(run_dir / "checkpoints/step-00000010")
    train(config, resume=True)  # from step 5
    shown = scalars(run_dir / "tensorboard/worker-0")
    assert shown["train/loss"] == told(run_dir, "step", "loss")
    assert [step for step, _ in shown["train/loss"]] == list(range(1, 13))
    assert shown["train/lr"] == told(run_dir, "step", "lr")
    assert shown["eval/loss"] == told(run_dir, "eval", "loss")
    assert shown["sync/all/norm"] == told(run_dir, "sync", "norm")
    assert shown["sync/all/committed"] == [(4, 1.0), (8, 1.0), (12, 1.0)]


def records(content: bytes) -> Iterator[bytes]:
    """Those of a log of LevelDB, behind the seven bytes of W&B: blocks of 32 kB, records in one piece or several."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no room for the head of a piece
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def logged_by_wandb(path: Path) -> list[dict[str, float]]:
    """The history in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.processes
def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch, logged):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_dir = tmp_path / "run"
    train(toy_config(tmp_path, "track.wandb=bridges"))
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert f"wandb is offline; send the run later with: wandb sync {path.parent}" in logged.messages
    rows = logged_by_wandb(path)
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == told(run_dir, "step", "loss")
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10, 12]


@pytest.mark.parametrize(
    ("override", "module"),
    [
        ("track.tensorboard=true", "tensorboard"),
        ("track.wandb=bridges", "wandb"),
        ("track.prometheus_port=9100", "prometheus_client"),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_begins(tmp_path, monkeypatch, override, module):
    for name in (module, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^track: .*: pip install 'isthmus\[track\]', or leave it out$") as caught:
        train(toy_config(tmp_path, override))
    assert module in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_tracker_cannot_write_goes_on(tmp_path, logged):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("in the way")
    assert train(toy_config(tmp_path, "track.tensorboard=true"))["finished"]
    (line,) = [line for line in logged.messages if "tensorboard" in line]
    assert "it gets no more events, training goes on" in line


def test_what_is_watched_changes_nothing_of_the_run(tmp_path):
    plain, watched = (
        toy_config(tmp_path),
        toy_config(tmp_path, "track.tensorboard=true", f"track.prometheus_port={free_ports()}"),
    )
    assert config_hash(plain) == config_hash(watched)
    train(watched)
    seen = events(tmp_path / "run", 0)
    shutil.rmtree(tmp_path / "run")
    train(plain)
    assert events(tmp_path / "run", 0) == seen


def test_a_fault_is_told_too(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def spoil(trainer):
        trainer.model.register_forward_hook(lambda module, args, loss: loss * float("nan") if spoiled.pop() else None)

    spoiled = [False] * 99 + [True]
    at_step(monkeypatch, 3, spoil)
    train(toy_config(tmp_path, "track.tensorboard=true"))
    read = EventAccumulator(str(tmp_path / "run/tensorboard/worker-0")).Reload()
    (fault,) = read.Tensors("fault/text_summary")
    assert (fault.step, fault.tensor_proto.string_val[0]) == (3, b"the gradient is not finite: step skipped")
