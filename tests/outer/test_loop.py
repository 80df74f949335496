"""What the outer loop does when all goes well, and what it must not lose when a sync is refused."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from tests.outer.test_identities import Shift, close, flat
from tests.toy import Worker, averaging, nesterov, toy_batch, toy_model, toy_run

from isthmus.compress import Cast
from isthmus.core import SyncSchedule, UserError, split_balanced, split_whole
from isthmus.outer import Eager, KeepProgress, Mix, OuterLoop, Replace
from isthmus.transport.base import Drift
from isthmus.transport.local import LocalWorld, run_workers

DELAYED = SyncSchedule(3, overlap_steps=3)


@pytest.mark.parametrize(
    ("schedule", "merge"),
    [
        (SyncSchedule(3), Replace()),
        (SyncSchedule(4, overlap_steps=1), KeepProgress()),
        (DELAYED, Replace()),
        (DELAYED, KeepProgress()),
        (DELAYED, KeepProgress(0.5)),
    ],
)
@pytest.mark.parametrize("refused", [1, 2])
def test_the_progress_of_a_refused_sync_rides_in_the_next_one(schedule, merge, refused) -> None:
    """On a slope every worker moves by 1/8 a step: after `finish` nothing is missing, refused or not."""
    world = LocalWorld(2)
    world.refuse_commit(refused)
    steps = 4 * schedule.local_steps
    workers = toy_run(
        world=world,
        steps=steps,
        inner=partial(Shift, amount=0.125),
        schedule=schedule,
        merge=merge,
        outer_optimizer=averaging,
        finish=True,
    )
    assert sum(not report.committed for worker in workers for report in worker.reports) == 2
    for worker in workers:
        close(worker.anchor, flat(toy_model()) - 0.125 * steps)
        assert torch.equal(worker.params, worker.anchor)


@pytest.mark.parametrize("merge", [Replace(), KeepProgress(), KeepProgress(0.5), Eager()])
@pytest.mark.parametrize("steps", [3, 7, 12])
def test_finish_leaves_nothing_behind_with_a_full_delay(merge, steps) -> None:
    workers = toy_run(
        2,
        steps=steps,
        inner=partial(Shift, amount=0.125),
        schedule=DELAYED,
        merge=merge,
        outer_optimizer=averaging,
        finish=True,
    )
    for worker in workers:
        close(worker.anchor, flat(toy_model()) - 0.125 * steps)
        assert torch.equal(worker.params, worker.anchor)


def test_a_refused_sync_changes_no_anchor_no_momentum_no_memory_and_no_version() -> None:
    seen: list[Any] = []

    def watch(rank: int, step: int, worker: Worker) -> None:
        if rank == 0 and step in (3, 6):
            optimizer = worker.loop.state.outer_optimizer.state_dict()["state"]
            momenta = [state["momentum_buffer"].clone() for state in optimizer.values()]
            seen.append((worker.anchor.clone(), momenta, worker.loop.state.fragments[0].version, worker.params.clone()))

    world = LocalWorld(2)
    world.refuse_commit(1)
    workers = toy_run(world=world, steps=6, each_step=watch)
    before, after = seen
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2] == after[2] == 1
    assert not torch.equal(before[3], after[3])  # the local parameters keep their progress
    assert [(report.outer_step, report.committed) for report in workers[0].reports] == [(0, True), (1, False)]
    assert workers[0].reports[1].reason


def test_a_mean_that_is_not_finite_never_reaches_an_anchor() -> None:
    def poison(rank: int, step: int, worker: Worker) -> None:
        if rank == 1 and step == 2:
            with torch.no_grad():
                next(worker.model.parameters())[0, 0] = float("nan")

    alone = toy_run(1, steps=3)
    for worker in toy_run(2, steps=3, each_step=poison):
        assert worker.reports[0].committed
        assert worker.reports[0].left_out == {1: "its contribution is not finite"}
        assert torch.equal(worker.anchor, alone[0].anchor)
        assert torch.equal(worker.params, worker.anchor)


def test_different_initial_weights_are_refused_at_once() -> None:
    def start(rank: int, transport: Any) -> None:
        OuterLoop(split_whole(toy_model(seed=rank)), SyncSchedule(3), Cast(), transport, nesterov)

    with pytest.raises(Drift):
        run_workers(LocalWorld(2), start)


def test_silent_drift_of_an_anchor_is_refused() -> None:
    def flip(rank: int, step: int, worker: Worker) -> None:
        if rank == 1 and step == 4:
            with torch.no_grad():
                worker.loop.state.fragments[0].anchor[0][0, 0] += 1e-6

    with pytest.raises(Drift):
        toy_run(2, steps=6, each_step=flip, hash_every=1)


def test_warm_start_averages_plainly_and_the_method_begins_after_it() -> None:
    schedule = SyncSchedule(4, warm_start_steps=3)
    warm = toy_run(2, steps=3, schedule=schedule)
    averaged = toy_run(2, steps=3, schedule=SyncSchedule(1), outer_optimizer=averaging)
    assert torch.equal(warm[0].params, averaged[0].params)
    assert not warm[0].loop.state.outer_optimizer.state  # momentum starts with the method
    assert len(toy_run(2, steps=11, schedule=schedule)[0].reports) == 3 + 2


def test_the_warm_start_has_a_learning_rate_of_its_own() -> None:
    schedule = SyncSchedule(4, warm_start_steps=3, warm_start_lr=1.5)
    warm = toy_run(2, steps=3, schedule=schedule)
    stepped = toy_run(2, steps=3, schedule=SyncSchedule(1), outer_optimizer=partial(torch.optim.SGD, lr=1.5))
    close(warm[0].anchor, stepped[0].anchor)
    assert torch.equal(warm[0].params, warm[0].anchor)
    ends_in_it = toy_run(2, steps=2, schedule=SyncSchedule(4, warm_start_steps=3, warm_start_every=3, warm_start_lr=9))
    averaged = toy_run(2, steps=2, schedule=SyncSchedule(4))
    close(ends_in_it[0].anchor, averaged[0].anchor)  # the last sync of a run is a plain mean


@pytest.mark.parametrize("merge", [Eager(), Replace(), KeepProgress()])
def test_warm_start_before_a_full_delay(merge) -> None:
    schedule = SyncSchedule(3, overlap_steps=3, warm_start_steps=2)
    workers = toy_run(
        2, steps=8, inner=partial(Shift, amount=0.125), schedule=schedule, merge=merge, outer_optimizer=averaging
    )
    landed = {Eager: 2 + 3 + 3 / 2, Replace: 2 + 3, KeepProgress: 2 + 3}[type(merge)]
    close(workers[0].anchor, flat(toy_model()) - 0.125 * landed)


def test_reports_tell_bytes_peers_norm_and_cosine() -> None:
    workers = toy_run(2, steps=3, batch=lambda worker, step: toy_batch(0, step))
    (report,) = workers[0].reports
    num_bytes = 40 + 4 * len(workers[0].params) + 9  # the guard's report, float32 values, one vote
    assert (report.num_peers, report.sent_bytes, report.received_bytes) == (2, num_bytes, num_bytes)
    assert report.cosine == pytest.approx(1.0, abs=1e-6)
    assert report.norm > 0
    assert report.committed


def test_a_step_without_a_sync_costs_less_than_a_millisecond() -> None:
    """The figure itself (under 50 microseconds) stands in benchmarks; this catches work on the common path."""
    (worker,) = toy_run(1, steps=1, schedule=SyncSchedule(10_000))
    began = time.perf_counter()
    for _ in range(1000):
        worker.loop.step()
    assert time.perf_counter() - began < 1.0


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(UserError, match="cut into 1 fragments, the schedule expects 2"):
        toy_run(1, schedule=SyncSchedule(4, num_fragments=2))
    with pytest.raises(UserError, match="kept of merge keep_progress should be from 0 to 1, got 2"):
        KeepProgress(2)
    with pytest.raises(UserError, match="use eager or keep_progress"):
        toy_run(1, schedule=DELAYED, merge=Mix(0.5))


def test_streaming_syncs_fragments_on_their_own() -> None:
    schedule = SyncSchedule(4, num_fragments=2, overlap_steps=1)
    workers = toy_run(2, steps=13, schedule=schedule, merge=Mix(0.5), split=lambda model: split_balanced(model, 2))
    assert [report.fragment for report in workers[0].reports] == ["0", "1", "0", "1", "0", "1"]
    assert [fragment.version for fragment in workers[0].loop.state.fragments] == [3, 3]
