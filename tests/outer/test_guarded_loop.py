"""What the outer loop does with a worker that is left out: it starts again from the anchor, the others go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.toy import Worker, toy_run

from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule, split_balanced
from isthmus.outer import Eager, KeepProgress, Mix, Replace
from isthmus.outer.guard import Guard
from isthmus.transport.local import LocalWorld

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
        guard=Guard(max_norm_factor=math.inf),
    )
    for worker in workers:
        assert [report.committed for report in worker.reports] == [True, False, True, True]
        assert worker.reports[1].reason == "the message of worker 1 is not finite"
        assert list(worker.reports[1].left_out) == [1]
        assert worker.params.abs().max() < 10
