"""A checkpoint gives back what it was given, or is named and refused."""

import errno
import math
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from isthmus.core import UserError
from isthmus.parallel import ParallelDims
from isthmus.train import checkpoint, checkpoint_files
from isthmus.train.checkpoint import Checkpoints, NotSaved

IDENTITY = {"model.hidden_size": 8, "parameter a": "[2] torch.float32"}


def state(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, generator=generator)
    return {
        "tensors": [rows[:3], rows[3:], torch.zeros(()).expand(2, 2)],  # shared storage, no storage
        "half": torch.randn(3, generator=generator).bfloat16(),
        "empty": torch.empty(0),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 7: {}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "plain": [None, True, 1, 0.1, "text", math.inf, (1, (2,))],
        "$": "a dollar",
        "a/b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
    }


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", 0, IDENTITY)


def test_load_gives_back_what_was_saved_bit_for_bit(checkpoints):
    checkpoints.save(200, state())
    assert equal(checkpoints.load(200), state())


def test_files_lie_where_they_are_documented(checkpoints):
    checkpoints.save(200, state())
    folder = checkpoints.folder / "step-00000200" / "worker-0"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "state.json", "state.safetensors"]


def test_what_is_neither_tensor_nor_plain_is_refused_by_its_path(checkpoints):
    with pytest.raises(TypeError, match=r"cannot write down state\['a'\]\[0\]\['b'\]: object"):
        checkpoints.save(1, {"a": [{"b": object()}]})


def test_usable_lists_newest_first(checkpoints):
    for step in (10, 30, 20):
        checkpoints.save(step, state())
    assert checkpoints.usable() == [30, 20, 10]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [flip, lambda path: os.truncate(path, path.stat().st_size - 1), lambda path: path.unlink()]
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(checkpoints, logged, name, damage):
    checkpoints.save(10, state(1))
    checkpoints.save(20, state(2))
    path = checkpoints.folder / "step-00000020/worker-0" / name
    damage(path)
    assert checkpoints.usable() == [10]
    assert len(logged.messages) == 1
    assert str(path) in logged.messages[0]
    assert "\n" not in logged.messages[0]


def test_another_version_of_the_format_is_refused(checkpoints, logged, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_FORMAT", 1)
    checkpoints.save(10, state())
    monkeypatch.undo()
    assert checkpoints.usable() == []
    assert "manifest.json is of another version of isthmus" in logged.messages[0]


def test_another_run_is_refused_with_both_values(checkpoints, tmp_path):
    checkpoints.save(10, state())
    other = Checkpoints(tmp_path / "checkpoints", 0, {**IDENTITY, "model.hidden_size": 16})
    with pytest.raises(UserError, match="model.hidden_size is 8 there and 16 here"):
        other.usable()
    fewer = Checkpoints(tmp_path / "checkpoints", 0, {"model.hidden_size": 8})
    with pytest.raises(UserError, match=r"parameter a is \[2\] torch.float32 there and None here"):
        fewer.usable()


def test_prune_keeps_the_newest_that_all_have_and_whatever_is_newer(checkpoints):
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, state())
    checkpoints.prune(keep=2, last_common=39)
    assert checkpoints.usable() == [50, 40, 30, 20]
    assert not (checkpoints.folder / "step-00000010").exists()
    checkpoints.prune(keep=2, last_common=9)
    assert checkpoints.usable() == [50, 40, 30, 20]


def test_another_workers_checkpoints_are_left_alone(checkpoints, tmp_path):
    other = Checkpoints(tmp_path / "checkpoints", 1, IDENTITY)
    for step in (10, 20):
        checkpoints.save(step, state())
        other.save(step, state())
    checkpoints.prune(keep=1, last_common=20)
    assert checkpoints.usable() == [20]
    assert other.usable() == [20, 10]


def test_discard_after(checkpoints):
    for step in (10, 20, 30):
        checkpoints.save(step, state())
    (checkpoints.folder / "step-00000020/worker-0.tmp").mkdir()
    checkpoints.discard_after(10)
    assert checkpoints.usable() == [10]
    assert not list(checkpoints.folder.glob("*/*.tmp"))


def test_a_step_that_is_reached_again_replaces_its_checkpoint(checkpoints):
    for seed in (1, 2, 3):
        checkpoints.save(10, state(seed))
    assert equal(checkpoints.load(10), state(3))
    assert [path.name for path in checkpoints.folder.glob("*/*")] == ["worker-0"]


def test_killed_while_a_checkpoint_is_replaced_the_former_one_is_put_back(checkpoints):
    checkpoints.save(10, state(1))
    path = checkpoints.folder / "step-00000010/worker-0"
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".tmp").mkdir()
    checkpoints.discard_half_done()
    assert equal(checkpoints.load(10), state(1))
    assert [path.name for path in checkpoints.folder.glob("*/*")] == ["worker-0"]


@pytest.mark.parametrize("there_is_one", [False, True])
def test_a_checkpoint_that_cannot_take_its_place_leaves_what_was_there(checkpoints, monkeypatch, there_is_one):
    if there_is_one:
        checkpoints.save(10, state(1))
    rename = Path.rename

    def full(path, target):
        if path.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(NotSaved, match="No space left on device"):
        checkpoints.save(10, state(2))
    assert checkpoints.usable() == [10][: int(there_is_one)]
    if there_is_one:
        assert equal(checkpoints.load(10), state(1))


def kill_at_call(function, number):
    """`function`, but its call `number` ends this process as SIGKILL does."""
    calls = iter(range(1, 1000))

    def wrapped(*args, **kwargs):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.processes
@pytest.mark.parametrize("number", range(1, 8))  # four files and folders are flushed before the rename, three after
def test_a_kill_while_writing_never_harms_the_last_good_one(checkpoints, monkeypatch, logged, number):
    checkpoints.save(10, state(1))
    pid = os.fork()
    if pid == 0:
        flush = kill_at_call(checkpoint.flush, number)
        monkeypatch.setattr(checkpoint, "flush", flush)
        monkeypatch.setattr(checkpoint_files, "flush", flush)
        checkpoints.save(20, state(2))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    newest = checkpoints.usable()[0]
    assert newest == (10 if number <= 4 else 20)
    assert equal(checkpoints.load(newest), state(newest // 10))
    assert not logged.messages  # half of a checkpoint is none: nothing to report
    checkpoints.save(20, state(3)) if newest == 10 else None
    assert 20 in checkpoints.usable()


@pytest.mark.processes
@pytest.mark.parametrize("number", range(1, 4))
def test_a_kill_while_deleting_leaves_whole_checkpoints(checkpoints, monkeypatch, logged, number):
    for step in (10, 20):
        checkpoints.save(step, state(step // 10))
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "unlink", kill_at_call(os.unlink, number))
        checkpoints.prune(keep=1, last_common=20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert checkpoints.usable() == [20]
    assert not logged.messages


def test_others_may_delete_meanwhile(checkpoints):
    checkpoints.save(1, state())
    over = threading.Event()

    def others():
        while not over.is_set():
            folder = checkpoints.folder / "step-00000002"
            (folder / "worker-1").mkdir(parents=True)
            (folder / "worker-1").rmdir()
            folder.rmdir()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(500):
            checkpoints.prune(1, last_common=1)
            checkpoints.discard_half_done()
    finally:
        over.set()
        thread.join()
    assert checkpoints.usable() == [1]


def ranks_of(folder, mesh):
    """The checkpoints of all ranks of worker 1."""
    return [Checkpoints(folder, 1, IDENTITY, rank, mesh) for rank in range(mesh.num_ranks)]


def test_on_another_mesh_the_ranks_share_out_who_looks_after_which_file(tmp_path, logged):
    for rank in ranks_of(tmp_path, ParallelDims(shard=3)):
        rank.save(10, state(rank.rank))
    one, two = ranks_of(tmp_path, ParallelDims(tp=2))
    assert [one.usable(), two.usable()] == [[10], [10]]
    assert one.mesh_of(10) == two.mesh_of(10) == ParallelDims(shard=3)
    flip(tmp_path / "step-00000010/worker-1-rank-1/state.safetensors")
    assert [one.usable(), two.usable()] == [[10], []]  # so it is not common
    assert len(logged.messages) == 1
    assert "worker-1-rank-1/state.safetensors was altered" in logged.messages[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_of_a_former_mesh_have_to_be_there(tmp_path, logged, ranks):
    first, *_ = ranks_of(tmp_path, ParallelDims(shard=3))
    first.save(10, state())
    assert [] in [rank.usable() for rank in ranks_of(tmp_path, ParallelDims(pp=ranks))]
    assert any("worker-1-rank-1/manifest.json cannot be read" in line for line in logged.messages)


def test_the_first_rank_tells_on_which_mesh_a_checkpoint_was_written(tmp_path):
    ranks_of(tmp_path, ParallelDims(shard=2))[1].save(10, state(1))  # left behind
    ranks_of(tmp_path, ParallelDims())[0].save(10, state(0))
    for rank in ranks_of(tmp_path, ParallelDims(shard=2)):
        assert rank.usable() == [10]
        assert rank.mesh_of(10) == ParallelDims()


def test_ranks_that_saved_on_different_meshes_are_no_checkpoint(tmp_path, logged):
    ranks_of(tmp_path, ParallelDims(shard=2))[0].save(10, state())
    ranks_of(tmp_path, ParallelDims(tp=2))[1].save(10, state())
    (alone,) = ranks_of(tmp_path, ParallelDims())
    assert alone.usable() == []
    assert "worker-1-rank-1 was written on another mesh than what lies beside it" in logged.messages[0]


def test_tensors_of_all_ranks_are_read_when_they_are_asked_for(tmp_path):
    for rank in ranks_of(tmp_path, ParallelDims(shard=2)):
        rank.save(10, state(rank.rank))
    (alone,) = ranks_of(tmp_path, ParallelDims())
    for seed, saved in enumerate(alone.load_ranks(10)):
        assert equal(saved["half"][1:], state(seed)["half"][1:])
        assert equal(saved["tensors"][2][()], state()["tensors"][2])
        assert saved["plain"] == state()["plain"]


def test_the_first_rank_deletes_what_ranks_left_that_are_no_more(tmp_path):
    for rank in ranks_of(tmp_path, ParallelDims(shard=3)):
        for step in (10, 20, 30):
            rank.save(step, state())
    first, second = ranks_of(tmp_path, ParallelDims(shard=2))
    (tmp_path / "step-00000020/worker-1-rank-2.tmp").mkdir()
    first.discard_after(20)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    names = ("worker-1", "worker-1-rank-1", "worker-1-rank-2")
    assert left == [f"step-000000{step}/{name}" for step in (10, 20) for name in names] + [
        "step-00000030/worker-1-rank-1"
    ]
    second.discard_after(20)
    shutil.rmtree(tmp_path / "step-00000010/worker-1")  # as where that rank's disk was full
    first.save(40, state())
    second.save(40, state())
    first.prune(keep=1, last_common=40)
    assert first.usable() == [40]
    assert second.usable() == [40, 20, 10]
    assert not list(tmp_path.glob("*/worker-1-rank-2"))
