"""What the outer loop does with a worker that is left out: it starts again from the anchor, the others go on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.toy import Worker, inner_step, nesterov, sgd, toy_batch, toy_model, toy_run

from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.robust import CentredClip, Median, NormClip, TrimmedMean, aggregate
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule, split_balanced, split_whole
from isthmus.outer import Eager, KeepProgress, Mix, OuterLoop, Replace
from isthmus.outer.guard import Guard
from isthmus.transport.local import LocalWorld, run_workers

adamw = partial(torch.optim.AdamW, lr=1e-2)

DELAYED = SyncSchedule(3, overlap_steps=3)
METHODS = {
    "diloco": {"schedule": SyncSchedule(3)},
    "feedback": {"schedule": SyncSchedule(3), "compressor": ErrorFeedback(Quantize(8, block=4))},
    "streaming": {
        "schedule": SyncSchedule(4, num_fragments=2, overlap_steps=1),
        "merge": Mix(0.5),
        "split": lambda model: split_balanced(model, 2),
    },
    "overlapped": {"schedule": SyncSchedule(4, overlap_steps=1), "merge": KeepProgress()},
    "delayed": {"schedule": DELAYED, "merge": Replace()},
    "delayed-keep": {"schedule": DELAYED, "merge": KeepProgress()},
    "eager": {"schedule": DELAYED, "merge": Eager()},
}


def always_bad(rank: int, step: int, worker: Worker) -> None:
    if rank == 3:
        with torch.no_grad():
            for param in worker.model.parameters():
                param += 1e4


@pytest.mark.parametrize("rule", [Median, TrimmedMean, NormClip, CentredClip, None])
@pytest.mark.parametrize(
    "compressor",
    [Cast(), ErrorFeedback(TopK(keep=4, chunk=8, values=Cast())), ErrorFeedback(LowRank(1, bypass=Cast()))],
    ids=["cast", "topk", "low-rank"],
)
def test_without_a_guard_a_robust_mean_bounds_what_one_of_four_does_in_every_sync(compressor: Any, rule: Any) -> None:
    """With the plain mean the anchors go with it, so this test can fail."""
    chosen = compressor if rule is None else aggregate(compressor, rule)
    workers = toy_run(4, steps=30, each_step=always_bad, compressor=chosen, guard=Guard(None))
    largest = float(workers[0].anchor.abs().max())
    assert largest > 1e3 if rule is None else largest < 30
    assert all(torch.equal(worker.anchor, workers[0].anchor) for worker in workers)


def adopt_longer(loop: OuterLoop, factor: float) -> None:
    """Make this worker's progress so many times as long."""
    with torch.no_grad():
        for fragment in loop.state.fragments:
            for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
                param.copy_(anchor + factor * (param - anchor))


def poison(at: int, value: float = math.nan, who: int = 1) -> Any:
    def each_step(rank: int, step: int, worker: Worker) -> None:
        if rank == who and step == at:
            with torch.no_grad():
                for param in worker.model.parameters():
                    param.flatten()[0] = value

    return each_step


@pytest.mark.parametrize("at", [2, 3, 4, 5])
@pytest.mark.parametrize("refused", [None, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_worker_with_nan_is_left_out_and_trains_on_from_the_anchor(name: str, refused: int | None, at: int) -> None:
    world = LocalWorld(3)
    if refused is not None:
        world.refuse_commit(refused)
    workers = toy_run(world=world, steps=16, each_step=poison(at), finish=True, **METHODS[name])
    for worker in workers:
        assert worker.anchor.isfinite().all()
        assert worker.params.isfinite().all()
        assert torch.equal(worker.params, workers[0].params) or name == "eager"  # its anchors are private
        assert sum(not report.committed for report in worker.reports) == (refused is not None)
        left_out = [report.left_out for report in worker.reports if report.left_out]
        assert left_out
        assert all(list(ranks) == [1] for ranks in left_out)
        assert not worker.reports[-1].left_out  # it is back
        assert all(t.isfinite().all() for f in worker.loop.state.fragments for t in f.state.get("residual", []))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "eager"])
def test_one_that_ran_away_is_left_out_too(name: str) -> None:
    for worker in toy_run(3, steps=16, each_step=poison(5, 1e5), finish=True, **METHODS[name]):
        assert worker.params.abs().max() < 10
        assert sum(1 in report.left_out for report in worker.reports) >= 1
        assert not worker.reports[-1].left_out


def test_a_lone_worker_starts_again_from_its_anchor() -> None:
    (worker,) = toy_run(1, steps=9, each_step=poison(5, who=0), finish=True)
    assert [report.committed for report in worker.reports] == [True, False, True]
    assert worker.params.isfinite().all()


def test_an_overflow_of_the_message_is_named_and_not_sent_for_ever() -> None:
    """fp16 ends at 65504: the first sync that meets it is refused, its sender starts over, the others keep theirs."""

    workers = toy_run(
        2,
        steps=12,
        each_step=poison(5, 1e5),
        finish=True,
        compressor=Cast("float16"),
        guard=Guard(max_norm_factor=None),
    )
    for worker in workers:
        assert [report.committed for report in worker.reports] == [True, False, True, True]
        assert worker.reports[1].reason == "the message of worker 1 is not finite"
        assert list(worker.reports[1].left_out) == [1]
        assert worker.params.abs().max() < 10


def uneven_run(steps_of: list[int], inner: Any, too_long: float = 1.0) -> list[Worker]:
    """Workers that take different numbers of inner steps in a round of 60; the first one's last is `too_long`."""
    rounds = 8

    def work(rank: int, transport: Any) -> Worker:
        model = toy_model()
        loop = OuterLoop(split_whole(model), SyncSchedule(60), Cast(), transport, nesterov)
        worker = Worker(model, inner(model.parameters()), loop)
        for number in range(rounds):
            for step in range(steps_of[rank]):
                inner_step(model, worker.optimizer, toy_batch(rank, 60 * number + step))
                if rank == 0 and number == rounds - 1 and step == steps_of[rank] - 1:
                    adopt_longer(loop, too_long)
                worker.reports += loop.step()
            if steps_of[rank] < 60:
                worker.reports += loop.skip()
        return worker

    return run_workers(LocalWorld(len(steps_of)), work)


@pytest.mark.parametrize("steps_of", [[60, 3, 3], [60, 60, 3], [60, 3, 3, 3], [60, 20, 2]], ids=str)
@pytest.mark.parametrize("inner", [adamw, sgd], ids=["adamw", "sgd"])
def test_workers_of_other_speed_are_not_left_out(steps_of: list[int], inner: Any) -> None:
    for worker in uneven_run(steps_of, inner):
        assert [report.left_out for report in worker.reports] == [{}] * 8


@pytest.mark.parametrize(("steps_of", "too_long"), [([60, 3, 3], 20.0), ([60, 60, 3], 20.0), ([3, 60, 60], 100.0)])
def test_one_that_is_too_long_is_left_out_whatever_its_speed(steps_of: list[int], too_long: float) -> None:
    for worker in uneven_run(steps_of, adamw, too_long):
        assert [list(report.left_out) for report in worker.reports] == [[]] * 7 + [[0]]


def test_steps_are_counted_over_refusals_captures_and_exclusions() -> None:
    """Each sync says how many inner steps are in it; two fragments are captured at different steps."""
    world = LocalWorld(2)
    world.refuse_commit(2)
    seen: list[list[int]] = []

    def each_step(rank: int, step: int, worker: Worker) -> None:
        if rank == 0:
            seen.append(
                [worker.loop.state.in_flight[k].num_steps if k in worker.loop.state.in_flight else 0 for k in range(2)]
            )

    method = METHODS["streaming"]
    toy_run(world=world, steps=12, each_step=each_step, **method)
    assert [max(sent) for sent in zip(*seen, strict=True)] == [8, 4]
