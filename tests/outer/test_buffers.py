"""Every buffer has a rule: what becomes of it when workers sync."""

from __future__ import annotations

import copy
import time
from typing import ClassVar

import pytest
import torch
from tests.elastic import Town
from tests.toy import Worker, inner_step, nesterov, sgd, toy_batch, toy_model, toy_run
from torch import nn

from isthmus.compress import Cast
from isthmus.core import SyncSchedule, buffer_rules, split_balanced, split_whole
from isthmus.outer import KeepProgress, Mix, OuterLoop
from isthmus.transport.local import LocalWorld, run_workers

SCHEDULES = {
    "blocking": {"schedule": SyncSchedule(3)},
    "fragments": {"schedule": SyncSchedule(4, 2, 1), "split": lambda m: split_balanced(m, 2), "merge": Mix(0.5)},
    "delayed": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": KeepProgress()},
}


class Counted(nn.Module):
    """Passes everything on; counts on its own, and holds what is said to be equal everywhere."""

    buffer_rules: ClassVar = {"same": "replicated"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("same", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs


def normed_model() -> nn.Module:
    model = toy_model()
    return nn.Sequential(model[0], nn.BatchNorm1d(4), Counted(), model[1], model[2])


def statistics(worker: Worker) -> torch.Tensor:
    return torch.cat([worker.model[1].running_mean, worker.model[1].running_var])


def test_the_rules_are_those_of_the_modules():
    assert buffer_rules(normed_model()) == {
        "1.running_mean": "averaged",
        "1.running_var": "averaged",
        "1.num_batches_tracked": "local",
        "2.calls": "local",
        "2.same": "replicated",
    }


@pytest.mark.parametrize("num_workers", [2, 3])
def test_running_statistics_become_the_mean_over_the_workers(num_workers):
    before, after = [{} for _ in range(num_workers)], [{} for _ in range(num_workers)]

    def work(rank, transport):
        model = normed_model()
        method = {"schedule": SyncSchedule(3), "compressor": Cast(), "outer_optimizer": nesterov}
        worker = Worker(model, sgd(model.parameters()), OuterLoop(split_whole(model), transport=transport, **method))
        for step in range(6):
            inner_step(model, worker.optimizer, toy_batch(rank, step))
            before[rank][step] = statistics(worker)
            worker.loop.step()
            after[rank][step] = statistics(worker)

    run_workers(LocalWorld(num_workers), work)
    for step in range(6):
        if step % 3 == 2:
            mean = torch.stack([before[rank][step] for rank in range(num_workers)]).mean(0)
            assert all(torch.allclose(after[rank][step], mean) for rank in range(num_workers))
            assert all(torch.equal(after[0][step], after[rank][step]) for rank in range(num_workers))
        else:
            assert all(torch.equal(after[rank][step], before[rank][step]) for rank in range(num_workers))
            assert not torch.equal(after[0][step], after[1][step])


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_they_are_equal_whenever_a_round_is_finished(method):
    seen = [{}, {}]

    def look(rank, step, worker):
        last = worker.loop.state.fragments[-1]
        if worker.reports and worker.reports[-1].fragment == last.name:
            seen[rank].setdefault(last.version, statistics(worker).clone())

    workers = toy_run(2, steps=24, make_model=normed_model, each_step=look, **method)
    assert len(seen[0]) >= 5
    assert all(torch.equal(value, seen[1][version]) for version, value in seen[0].items())
    assert [worker.model[2].calls.item() for worker in workers] == [24, 24]


def test_their_bytes_are_counted():
    with_buffers, without = (toy_run(2, steps=3, make_model=make) for make in (normed_model, normed_without))
    difference = with_buffers[0].reports[0].sent_bytes - without[0].reports[0].sent_bytes
    assert difference == 4 * 8  # of two workers each sends what it has: 8 numbers in float32


def normed_without() -> nn.Module:
    model = normed_model()
    model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    return model


def test_statistics_that_are_not_finite_are_refused_by_all():
    def spoil(rank, step, worker):
        if rank == 1 and step == 2:
            worker.model[1].running_var[0] = torch.inf

    workers = toy_run(2, steps=3, make_model=normed_model, each_step=spoil)
    assert [worker.reports[0].reason for worker in workers] == ["the mean of a buffer is not finite"] * 2
    assert workers[0].model[1].running_var.isfinite().all()


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_resumed_with_a_sync_in_flight_it_ends_the_same(method):
    """The statistics of that sync are those of its capture, not those of the checkpoint."""
    method = {**method}
    split = method.pop("split", split_whole)

    def run(resume_at):
        def work(rank, transport):
            model = normed_model()
            method_ = {"compressor": Cast(), "outer_optimizer": nesterov, **method}
            worker = Worker(model, sgd(model.parameters()), OuterLoop(split(model), transport=transport, **method_))
            for step in range(14):
                if step == resume_at:
                    saved = copy.deepcopy([model.state_dict(), worker.loop.state_dict()])
                    for tensor in model.state_dict().values():
                        tensor.fill_(7)
                    model.load_state_dict(saved[0])
                    worker.loop.load_state_dict(saved[1])
                inner_step(model, worker.optimizer, toy_batch(rank, step))
                worker.loop.step()
            return worker

        return run_workers(LocalWorld(2), work)

    whole = run(None)
    for resume_at in (4, 8):
        for one, other in zip(whole, run(resume_at), strict=True):
            assert torch.equal(statistics(one), statistics(other))
            assert torch.equal(one.params, other.params)


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_worker_that_comes_late_is_handed_all_that_is_shared(method):
    town = Town(40, min_workers=1, expected_workers=1, make_model=normed_model, **method)

    def follow(worker):
        worker.model[2].same.fill_(worker.loop.state.fragments[-1].version)
        time.sleep(0.02)

    town.start("worker-0", each_step=follow)
    while len(town.hashes) < 4 and not town.errors:
        time.sleep(0.01)
    handed = []

    def look(worker):
        if not handed:
            handed.append((worker.model[2].same.clone(), worker.model[2].calls.item()))
        follow(worker)

    town.start("worker-1", each_step=look)
    town.wait()
    first, second = (town.workers[f"worker-{k}"] for k in range(2))
    assert (handed[0][0] >= 1).all()
    assert handed[0][1] < 20, "what is local stays so"
    assert torch.equal(statistics(first), statistics(second))
    assert first.loop.anchor_hash() == second.loop.anchor_hash()
