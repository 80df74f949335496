"""The outer loop, over a transport and a communication thread, against DiLoCo in plain loops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.outer.reference_diloco import diloco
from tests.toy import inner_step, toy_batch, toy_model, toy_run

from isthmus.core import SyncSchedule


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_outer_loop_is_diloco(num_workers):
    inner = partial(torch.optim.AdamW, lr=0.05)
    anchor = diloco(
        [toy_model() for _ in range(num_workers)],
        inner,
        lambda model, optimizer, worker, step: inner_step(model, optimizer, toy_batch(worker, step)),
        local_steps=5,
        outer_steps=6,
        lr=0.7,
        momentum=0.9,
    )
    workers = toy_run(
        num_workers,
        steps=30,
        inner=inner,
        schedule=SyncSchedule(5),
        outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    )
    for worker in workers:
        torch.testing.assert_close(worker.anchor, torch.cat([value.reshape(-1) for value in anchor]))
        assert torch.equal(worker.params, worker.anchor)
