"""Where the evaluation explodes all workers go back to the last good anchors, in one sync, and train on."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from tests.elastic import Killed, Town
from tests.outer.test_guarded_loop import METHODS
from tests.toy import Worker, toy_batch, toy_model, toy_run
from torch import nn

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule, UserError
from isthmus.outer import Rollback, anchored
from isthmus.outer.guard import Guard
from isthmus.outer.rollback import Rollbacks
from isthmus.transport.local import LocalWorld

EVAL_EVERY = 5
ON = {"rollback": Rollback(max_loss_factor=20.0), "guard": Guard(None)}


def evaluation(worker: Worker) -> float:
    inputs, targets = toy_batch(99, 0, size=50)
    with torch.no_grad(), anchored(worker.loop.state.fragments):
        return float(nn.functional.mse_loss(worker.model(inputs), targets))


def explode(worker: Worker) -> None:
    with torch.no_grad():
        for param in worker.model.parameters():
            param *= 300.0


class Watch:
    """Evaluates on worker 0, lets worker 1 blow the model up at some steps, and looks at the anchors of all."""

    def __init__(self, *exploding: int, factor: float = 300.0) -> None:
        self.exploding = exploding
        self.losses: dict[int, float] = {}
        self.went_back: dict[int, list[int]] = defaultdict(list)  # by rank: the steps at which a rollback was seen
        self.good: dict[str, Any] = {}
        self.restored: list[Any] = []

    def best_before(self, step: int) -> float:
        return min(loss for at, loss in self.losses.items() if at <= step)

    def best_after(self, step: int) -> float:
        return min(loss for at, loss in self.losses.items() if at > step)

    def __call__(self, rank: int, step: int, worker: Worker) -> None:
        if rank == 1 and step in self.exploding:
            explode(worker)
        state = worker.loop.state
        if state.rollbacks.number > len(self.went_back[rank]):
            self.went_back[rank].append(step)
            self.restored.append(outer_state_of(worker))
        if rank == 0 and step % EVAL_EVERY == 0:
            self.losses[step] = evaluation(worker)
            before = state.rollbacks._good_step
            worker.loop.note_evaluation(self.losses[step])
            if state.rollbacks._good_step != before and not state.rollbacks.number:
                self.good = outer_state_of(worker)


def outer_state_of(worker: Worker) -> dict[str, Any]:
    state = worker.loop.state
    buffers = [buffer.clone() for fragment in state.fragments for buffer in fragment.shared_buffers]
    return copy.deepcopy(
        {"anchor": worker.anchor, "optimizer": state.outer_optimizer.state_dict()["state"], "buffers": buffers}
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def normed_model() -> nn.Module:
    return nn.Sequential(toy_model(), nn.BatchNorm1d(2))


@pytest.mark.parametrize("make_model", [toy_model, normed_model])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "eager"])
def test_all_go_back_to_the_last_good_anchors_in_the_same_sync_and_train_on(name: str, make_model: Any) -> None:
    watch = Watch(25)
    workers = toy_run(3, steps=70, each_step=watch, finish=True, make_model=make_model, **ON, **METHODS[name])
    assert max(watch.losses.values()) > 1e3 * watch.best_before(25)
    assert watch.went_back[0] == watch.went_back[1] == watch.went_back[2]
    assert [worker.loop.state.rollbacks.number for worker in workers] == [1] * 3
    assert all(equal(restored, watch.good) for restored in watch.restored)
    assert len(watch.restored) == 3
    assert watch.best_after(watch.went_back[0][0]) < 1.2 * watch.best_before(25)
    for worker in workers:
        assert torch.equal(worker.anchor, workers[0].anchor)
        assert all(report.committed for report in worker.reports)


def test_without_it_the_model_stays_blown_up() -> None:
    """Else the test above could not fail."""
    watch = Watch(25)
    toy_run(3, steps=70, each_step=watch, guard=Guard(None), schedule=SyncSchedule(3))
    assert watch.best_after(30) > 10 * watch.best_before(25)


@pytest.mark.parametrize(("refused", "step"), [(9, 33), (10, 36), (None, 33)])
def test_a_refused_sync_takes_nobody_back_and_the_next_one_all(refused: int | None, step: int) -> None:
    """It explodes in sync 8, after step 27, is noticed after step 30, and sync 10, after step 33, asks to go back."""
    watch, world = Watch(25), LocalWorld(3)
    if refused is not None:
        world.refuse_commit(refused)
    workers = toy_run(world=world, steps=70, each_step=watch, schedule=SyncSchedule(3), **ON)
    assert watch.went_back == {0: [step], 1: [step], 2: [step]}
    assert all(equal(restored, watch.good) for restored in watch.restored)
    assert watch.best_after(step) < 1.2 * watch.best_before(25)
    assert {worker.loop.anchor_hash() for worker in workers} == {workers[0].loop.anchor_hash()}


def test_one_rollback_too_many_ends_the_run_in_one_line() -> None:
    on = ON | {"rollback": Rollback(20.0, max_rollbacks=2)}
    with pytest.raises(
        UserError, match="^the evaluation has exploded again after 2 rollbacks: lower inner.optimizer.lr"
    ):
        toy_run(3, steps=200, each_step=Watch(25, 45, 65), schedule=SyncSchedule(3), **on)


def test_two_rollbacks_of_two() -> None:
    on, watch = ON | {"rollback": Rollback(20.0, max_rollbacks=2)}, Watch(25, 45)
    toy_run(3, steps=70, each_step=watch, schedule=SyncSchedule(3), **on)
    assert watch.went_back == {0: [33, 51], 1: [33, 51], 2: [33, 51]}


def test_everything_not_finite_everywhere_is_no_reason_not_to_go_back() -> None:
    """The guard would leave out everybody, and refuse the sync for ever."""

    def each_step(rank: int, step: int, worker: Worker) -> None:
        if step == 30 and rank == 0:
            worker.loop.note_evaluation(1.0)
        if step == 31:
            with torch.no_grad():
                for param in worker.model.parameters():
                    param.fill_(math.nan)
            if rank == 0:
                worker.loop.note_evaluation(math.nan)

    for worker in toy_run(3, steps=36, each_step=each_step, schedule=SyncSchedule(3), rollback=Rollback()):
        assert worker.loop.state.rollbacks.number == 1
        assert worker.params.isfinite().all()
        assert all(report.committed for report in worker.reports)


def test_an_error_feedback_that_remembers_the_explosion_is_forgotten() -> None:
    compressor, watch = ErrorFeedback(Quantize(4, block=8)), Watch(25)
    workers = toy_run(3, steps=70, each_step=watch, compressor=compressor, schedule=SyncSchedule(3), **ON)
    assert watch.best_after(watch.went_back[0][0]) < 1.2 * watch.best_before(25)
    assert {worker.loop.anchor_hash() for worker in workers} == {workers[0].loop.anchor_hash()}


@pytest.mark.parametrize("name", ["diloco", "streaming", "delayed"])
def test_identity_37_saved_before_and_during_a_rollback_it_goes_on_as_if_nothing_had_been(name: str) -> None:
    def run(resumed_at: int | None = None) -> list[Worker]:
        watch = Watch(25)

        def each_step(rank: int, step: int, worker: Worker) -> None:
            watch(rank, step, worker)
            if step == resumed_at:
                saved = copy.deepcopy([worker.model.state_dict(), worker.loop.state_dict()])
                forget(worker)
                worker.model.load_state_dict(saved[0])
                worker.loop.load_state_dict(saved[1])

        return toy_run(3, steps=50, each_step=each_step, **ON, **METHODS[name])

    whole = run()
    assert whole[0].loop.state.rollbacks.number == 1
    for step in (25, 28, 30, 31, 32, 33, 36):
        for worker, before in zip(run(step), whole, strict=True):
            assert worker.loop.state.rollbacks.number == 1
            assert torch.equal(worker.params, before.params)
            assert equal(outer_state_of(worker), outer_state_of(before))


def forget(worker: Worker) -> None:
    state = worker.loop.state
    for tensor in worker.model.state_dict().values():
        tensor.fill_(7)
    state.rollbacks = Rollbacks(state.rollbacks.rollback, state.fragments, state.outer_optimizer)


def test_nothing_is_kept_sent_or_saved_where_runs_never_go_back() -> None:
    (worker,) = toy_run(1, steps=6)
    worker.loop.note_evaluation(1.0)
    worker.loop.note_evaluation(math.nan)
    assert not worker.loop.state_dict().keys() & {"num_rollbacks", "last_good"}
    assert not worker.loop.state.rollbacks._good


def test_without_a_good_evaluation_there_is_nothing_to_go_back_to(caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = toy_run(1, steps=6, rollback=Rollback())
    worker.loop.note_evaluation(math.inf)
    assert "none before it was good: there is nothing to go back to" in caplog.text
    assert not worker.loop.state.rollbacks._wanted


@pytest.mark.parametrize(("options", "message"), [((1.0, 3), "max_loss_factor 1.0"), ((2.0, 0), "max_rollbacks 0")])
def test_bad_values_are_one_clear_line(options: tuple[float, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rollback(*options)


ELASTIC = {name: METHODS[name] for name in ("diloco", "streaming", "delayed-keep")}


class ElasticWatch:
    """The same in an elastic world: worker-0 evaluates, worker-1 blows the model up once, at a step of the run."""

    def __init__(self, exploding: int) -> None:
        self.exploding, self.losses, self.lock = exploding, dict[int, float](), threading.Lock()
        self.anchors: dict[int, set[str]] = defaultdict(set)  # after the rollback, by version

    def __call__(self, worker: Worker) -> None:
        step, name = worker.loop.state.inner_steps, threading.current_thread().name
        time.sleep(0.005)
        if name == "worker-1" and step >= self.exploding:
            self.exploding = 10**9
            explode(worker)
        if name == "worker-0" and step // EVAL_EVERY > len(self.losses):
            self.losses[step] = evaluation(worker)
            worker.loop.note_evaluation(self.losses[step])


def named(watch: ElasticWatch, name: str) -> Any:
    def each_step(worker: Worker) -> None:
        threading.current_thread().name = name
        watch(worker)

    return each_step


@pytest.mark.waits
@pytest.mark.parametrize("name", ELASTIC)
def test_in_an_elastic_world_all_go_back_and_one_who_comes_later_knows(name: str) -> None:
    watch = ElasticWatch(26)
    town = Town(120, min_workers=2, expected_workers=3, **ON, **ELASTIC[name])
    for k in range(3):
        town.start(f"worker-{k}", each_step=named(watch, f"worker-{k}"))
    while max(watch.losses, default=0) < 70 and not town.errors:
        time.sleep(0.01)
    town.start("worker-3", each_step=named(watch, "worker-3"))
    town.wait(60)
    assert max(watch.losses.values()) > 1e3 * min(watch.losses.values())
    assert [worker.loop.state.rollbacks.number for worker in town.workers.values()] == [1] * 4
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    late = [loss for step, loss in watch.losses.items() if step > 60]
    assert min(late) < 1.2 * min(loss for step, loss in watch.losses.items() if step <= 26)


@pytest.mark.waits
@pytest.mark.parametrize("point", ["connect", "vote", "committed"])
@pytest.mark.parametrize("name", ELASTIC)
def test_one_that_dies_while_all_go_back_comes_back_to_the_good_anchors(name: str, point: str) -> None:
    watch, died = ElasticWatch(26), threading.Event()

    def die(now: str) -> None:
        if now != point or died.is_set() or len(town.workers) < 3:
            return
        evaluating, own = (town.workers[name].loop.state.rollbacks for name in ("worker-0", "worker-2"))
        if not own.number and (evaluating.wanted or evaluating.number):
            died.set()
            raise Killed

    town = Town(120, min_workers=2, expected_workers=3, **ON, **ELASTIC[name])
    town.start("worker-0", each_step=named(watch, "worker-0"))
    town.start("worker-1", each_step=named(watch, "worker-1"))
    dying = town.start("worker-2", die, each_step=named(watch, "worker-2"))
    assert died.wait(20)
    dying.join(20)
    town.start("worker-2", each_step=named(watch, "worker-2"))
    town.wait(60)
    assert [worker.loop.state.rollbacks.number for worker in town.workers.values()] == [1] * 3
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    late = [loss for step, loss in watch.losses.items() if step > 60]
    assert min(late) < 1.2 * min(loss for step, loss in watch.losses.items() if step <= 26)
