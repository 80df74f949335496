"""The identities of docs/identities.md that speak of the outer loop, by their numbers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.toy import Lazy, Worker, averaging, inner_step, nesterov, sgd, toy_batch, toy_model, toy_run
from torch import nn

from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule, split_balanced, split_whole
from isthmus.outer import Eager, KeepProgress, Mix, Offload, OuterLoop, Replace
from isthmus.transport.local import LocalWorld, run_workers

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
STEPS = 12


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def alone(worker: int = 0, steps: int = STEPS, inner=sgd) -> torch.Tensor:
    model = toy_model()
    optimizer = inner(model.parameters())
    for step in range(steps):
        inner_step(model, optimizer, toy_batch(worker, step))
    return flat(model)


def data_parallel(num_workers: int, optimizer_of, steps: int = STEPS) -> torch.Tensor:
    """The textbook: one model, the mean gradient of all workers' batches at every step."""
    model = toy_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(num_workers):
            inputs, targets = toy_batch(worker, step)
            (nn.functional.mse_loss(model(inputs), targets) / num_workers).backward()
        optimizer.step()
    return flat(model)


def test_identity_1_averaging_is_the_mean_of_parameters() -> None:
    workers = toy_run(3, steps=4, schedule=SyncSchedule(4), outer_optimizer=averaging)
    mean = torch.stack([alone(rank, 4) for rank in range(3)]).mean(0)
    for worker in workers:
        close(worker.anchor, mean)
        assert torch.equal(worker.params, worker.anchor)


@pytest.mark.parametrize(
    "inner",
    [sgd, partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.SGD, lr=0.05, weight_decay=0.1)],
)
def test_identity_2_h1_with_a_linear_inner_optimizer_is_data_parallel(inner) -> None:
    workers = toy_run(3, inner=inner, schedule=SyncSchedule(1), outer_optimizer=averaging)
    close(workers[0].anchor, data_parallel(3, inner))


def test_identity_2_does_not_hold_for_adam() -> None:
    adam = partial(torch.optim.Adam, lr=0.05)
    workers = toy_run(3, inner=adam, schedule=SyncSchedule(1), outer_optimizer=averaging)
    assert (workers[0].anchor - data_parallel(3, adam)).abs().max() > 1e-3


@pytest.mark.parametrize("outer", [nesterov, partial(torch.optim.Adam, lr=0.03), partial(torch.optim.SGD, lr=0.3)])
def test_identity_3_h1_with_plain_sgd_inside_is_data_parallel_with_any_outer_optimizer(outer) -> None:
    unit = partial(torch.optim.SGD, lr=1.0)
    workers = toy_run(2, inner=unit, schedule=SyncSchedule(1), outer_optimizer=outer)
    close(workers[1].anchor, data_parallel(2, outer))


def test_identity_4_one_worker_averaging_is_uninterrupted_training() -> None:
    adam = partial(torch.optim.Adam, lr=0.02)
    (worker,) = toy_run(1, inner=adam, outer_optimizer=averaging)
    close(worker.params, alone(0, inner=adam))


def test_identity_4_one_worker_with_lr_below_1_is_lookahead() -> None:
    (worker,) = toy_run(1, schedule=SyncSchedule(3), outer_optimizer=partial(torch.optim.SGD, lr=0.5))
    model = toy_model()
    optimizer, slow = sgd(model.parameters()), flat(toy_model())
    for step in range(STEPS):
        inner_step(model, optimizer, toy_batch(0, step))
        if (step + 1) % 3 == 0:
            slow = slow + 0.5 * (flat(model) - slow)
            nn.utils.vector_to_parameters(slow.clone(), model.parameters())
    close(worker.anchor, slow)


@pytest.mark.parametrize("merge", [Replace(), Mix(0.5)])
def test_identity_5_identical_workers_are_one_worker(merge) -> None:
    def same(worker: int, step: int):
        return toy_batch(0, step)

    schedule = SyncSchedule(4, overlap_steps=0 if merge == Replace() else 1)
    (one,) = toy_run(1, batch=same, schedule=schedule, merge=merge)
    for worker in toy_run(3, batch=same, schedule=schedule, merge=merge):
        close(worker.params, one.params)
        close(worker.anchor, one.anchor)


def test_identity_6_nesterov_gain_of_a_constant_pseudo_gradient() -> None:
    """The anchor moves by lr (1 + mu) of it first, and by lr / (1 - mu) in the end."""
    anchors = [flat(toy_model())]

    def watch(rank: int, step: int, worker: Worker) -> None:
        anchors.append(worker.anchor.clone())

    toy_run(1, steps=150, inner=partial(Shift, amount=0.5), schedule=SyncSchedule(1), each_step=watch)
    close(anchors[0] - anchors[1], torch.full_like(anchors[0], 0.5 * 0.7 * 1.9))
    last = anchors[-2] - anchors[-1]
    torch.testing.assert_close(last, torch.full_like(last, 0.5 * 0.7 / (1 - 0.9)), rtol=1e-3, atol=0)


def test_identity_7_streaming_with_one_fragment_no_overlap_no_mix_is_diloco_bitwise() -> None:
    diloco = toy_run(2)
    streaming = toy_run(2, schedule=SyncSchedule(3, num_fragments=1, overlap_steps=0), merge=Mix(0.0))
    for a, b in zip(diloco, streaming, strict=True):
        assert torch.equal(a.params, b.params)
        assert torch.equal(a.anchor, b.anchor)


@pytest.mark.parametrize("num_fragments", [2, 4])
def test_identity_8_the_partition_does_not_matter_for_an_elementwise_method(num_fragments: int) -> None:

    class Together(SyncSchedule):
        def begins(self, step: int) -> list[int]:
            return list(range(self.num_fragments)) if step % self.local_steps == 0 else []

    whole = toy_run(2, schedule=SyncSchedule(4))
    parts = toy_run(
        2,
        schedule=Together(4, num_fragments),
        split=lambda model: split_balanced(model, num_fragments),
    )
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.params, b.params)


def test_identity_9_alpha_1_never_adopts_while_the_anchor_evolves() -> None:
    workers = toy_run(2, merge=Mix(1.0))
    for rank, worker in enumerate(workers):
        assert torch.equal(worker.params, alone(rank))
        assert not torch.equal(worker.anchor, flat(toy_model()))


def test_identity_9_alpha_0_makes_replicas_agree_bitwise_and_the_merge_is_affine() -> None:
    schedule = SyncSchedule(3, overlap_steps=1)
    after = {alpha: toy_run(2, steps=4, schedule=schedule, merge=Mix(alpha)) for alpha in (0.0, 0.25, 1.0)}
    assert torch.equal(after[0.0][0].params, after[0.0][1].params)
    for rank in range(2):
        expected = 0.25 * after[1.0][rank].params + 0.75 * after[0.0][rank].params
        close(after[0.25][rank].params, expected)


def eager_run(num_workers: int, rounds: int, **method: Any) -> list[Worker]:
    schedule = SyncSchedule(3, overlap_steps=3)
    method = {"outer_optimizer": averaging, **method}
    return toy_run(num_workers, steps=3 * rounds, schedule=schedule, merge=Eager(), **method)


def in_flight(worker: Worker) -> torch.Tensor:
    """The pseudo-gradient that the worker has on its way."""
    return torch.cat(
        [tensor.reshape(-1) for sync in worker.loop.state_dict()["in_flight"] for tensor in sync["pseudo_gradient"]]
    )


def test_identity_11_eager_with_one_worker_has_no_delay() -> None:
    (eager,) = eager_run(1, 4, outer_optimizer=nesterov)
    (diloco,) = toy_run(1, steps=12, schedule=SyncSchedule(3), outer_optimizer=nesterov)
    close(eager.anchor, diloco.anchor)


def test_identity_11_mean_and_conservation() -> None:
    """The mean anchor has moved by sum over t < T of mean(t), plus mean(T) / M."""
    rounds, M = 5, 3
    own: list[list[torch.Tensor]] = [[] for _ in range(M)]

    def watch(rank: int, step: int, worker: Worker) -> None:
        if step % 3 == 0:
            own[rank].append(in_flight(worker))

    workers = eager_run(M, rounds, each_step=watch)
    means = [torch.stack([own[rank][t] for rank in range(M)]).mean(0) for t in range(rounds)]
    moved = flat(toy_model()) - torch.stack([worker.anchor for worker in workers]).mean(0)
    close(moved, sum(means[:-1]) + means[-1] / M)


def test_identity_11_disagreement_is_the_difference_of_the_last_shares() -> None:
    a, b = eager_run(2, rounds=6)
    close(a.anchor - b.anchor, -(in_flight(a) - in_flight(b)) / 2)


@pytest.mark.parametrize("kept", [0, 0.25, 0.5, 1])
def test_keep_progress_with_plain_averaging_counts_everything_once(kept) -> None:
    """On a slope the anchor lags one round behind, and the local parameters hold `kept` of that (1: LOSCAR)."""
    workers = toy_run(
        2,
        steps=12,
        inner=partial(Shift, amount=0.125),
        schedule=SyncSchedule(3, overlap_steps=3),
        merge=KeepProgress(kept),
        outer_optimizer=averaging,
    )
    for worker in workers:
        close(worker.anchor, flat(toy_model()) - 9 * 0.125)  # rounds 1-3 have landed, round 4 is in flight
        close(worker.params, flat(toy_model()) - (9 + 3 * kept) * 0.125)


def test_eager_anchors_do_not_part_however_much_a_compressor_leaves_out() -> None:
    """What a decayed residual loses must not stay in one worker's anchor for ever."""
    lossy = ErrorFeedback(TopK(4, 16, values=Quantize(8, 4)), decay=0.5)
    workers = eager_run(2, rounds=40, compressor=lossy)
    a, b = workers
    close(a.anchor - b.anchor, -(in_flight(a) - in_flight(b)) / 2)


class Shift(torch.optim.Optimizer):
    """Moves every parameter by the same amount at every step, whatever its gradient."""

    def __init__(self, params, amount: float) -> None:
        super().__init__(params, {"amount": amount})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["amount"]


def test_identity_19_weights_by_tokens_give_the_gradient_of_the_pooled_batch() -> None:
    sizes = [2, 6]

    def batch(worker: int, step: int):
        return toy_batch(worker, step, sizes[worker])

    unit = partial(torch.optim.SGD, lr=1.0)
    world = LocalWorld(2, weights=[size / sum(sizes) for size in sizes])
    workers = toy_run(2, steps=3, inner=unit, batch=batch, world=world, schedule=SyncSchedule(1), outer_optimizer=sgd)
    model = toy_model()
    optimizer = sgd(model.parameters())
    for step in range(3):
        pooled = [torch.cat(side) for side in zip(*(batch(rank, step) for rank in range(2)), strict=True)]
        inner_step(model, optimizer, tuple(pooled))
    close(workers[0].anchor, flat(model))
    uniform = toy_run(2, steps=3, inner=unit, batch=batch, schedule=SyncSchedule(1), outer_optimizer=sgd)
    assert (uniform[0].anchor - flat(model)).abs().max() > 1e-3


@pytest.mark.parametrize("merge", [Replace(), Mix(0.5), KeepProgress()])
def test_identity_34_anchors_and_outer_momenta_are_equal_after_every_commit(merge) -> None:
    overlap = {Replace: 0, Mix: 1, KeepProgress: 4}[type(merge)]
    workers = toy_run(3, steps=20, schedule=SyncSchedule(4, overlap_steps=overlap), merge=merge)
    assert len({worker.loop.anchor_hash() for worker in workers}) == 1
    momenta = [
        torch.cat([s["momentum_buffer"].reshape(-1) for s in worker.loop.state.outer_optimizer.state.values()])
        for worker in workers
    ]
    assert all(torch.equal(momenta[0], momentum) for momentum in momenta[1:])


@pytest.mark.parametrize(
    ("schedule", "merge", "compressor"),
    [
        (SyncSchedule(3), Replace(), Cast()),
        (SyncSchedule(4, num_fragments=2, overlap_steps=1), Mix(0.5), Cast()),
        (SyncSchedule(4, overlap_steps=4), Eager(), Cast()),
        (SyncSchedule(4, overlap_steps=4), KeepProgress(), Cast()),
        (SyncSchedule(4, overlap_steps=4), Replace(), Cast()),
        (SyncSchedule(4, overlap_steps=4, warm_start_steps=2), Replace(), Cast()),
        (SyncSchedule(4, overlap_steps=4, warm_start_steps=2), KeepProgress(), Lazy()),
    ],
)
@pytest.mark.parametrize("saved_at", [1, 5, 9, 12])
def test_identity_37_saved_and_restored_at_any_step_the_run_is_the_same_bitwise(
    schedule, merge, compressor, saved_at
) -> None:
    steps = 17
    split = split_whole if schedule.num_fragments == 1 else lambda model: split_balanced(model, schedule.num_fragments)
    saved: dict[int, Any] = {}

    def save(rank: int, step: int, worker: Worker) -> None:
        if step == saved_at:
            saved[rank] = copy.deepcopy((worker.model.state_dict(), worker.loop.state_dict()))

    method = {"schedule": schedule, "merge": merge, "compressor": compressor}
    whole = toy_run(2, steps=steps, split=split, each_step=save, **method)

    def resume(rank: int, transport: Any) -> Worker:
        model = toy_model(seed=1)
        worker = Worker(
            model,
            sgd(model.parameters()),
            OuterLoop(split(model), transport=transport, outer_optimizer=nesterov, **method),
        )
        model.load_state_dict(saved[rank][0])
        worker.loop.load_state_dict(saved[rank][1])
        for step in range(saved_at, steps):
            inner_step(model, worker.optimizer, toy_batch(rank, step))
            worker.loop.step()
        return worker

    for one, other in zip(whole, run_workers(LocalWorld(2), resume), strict=True):
        assert torch.equal(one.params, other.params)
        assert torch.equal(one.anchor, other.anchor)
        assert [f.version for f in one.loop.state.fragments] == [f.version for f in other.loop.state.fragments]


@pytest.mark.parametrize("outer", [nesterov, partial(torch.optim.Adam, lr=0.03)])
@pytest.mark.parametrize(
    ("schedule", "merge", "compressor"),
    [
        (SyncSchedule(3, warm_start_steps=2), Replace(), ErrorFeedback(Quantize(2, 8))),
        (SyncSchedule(4, num_fragments=2, overlap_steps=1), Mix(0.5), Cast()),
        (SyncSchedule(4, overlap_steps=4), Eager(), Cast("float16")),
        (SyncSchedule(4, overlap_steps=4), KeepProgress(), ErrorFeedback(LowRank(1, factors=Quantize(8, 4)))),
    ],
)
def test_identity_38_offloaded_outer_state_gives_the_same_result_bitwise(schedule, merge, compressor, outer) -> None:
    """Sharded state: tests/outer/test_sharded.py; replicated state is what all other tests here have."""
    method = {"schedule": schedule, "merge": merge, "compressor": compressor, "outer_optimizer": outer}
    split = partial(split_balanced, num_fragments=schedule.num_fragments)
    here = toy_run(2, steps=17, split=split, finish=True, **method)
    away = toy_run(2, steps=17, split=split, finish=True, offload=Offload("cpu"), **method)
    for one, other in zip(here, away, strict=True):
        assert torch.equal(one.params, other.params)
        assert torch.equal(one.anchor, other.anchor)
        assert one.reports == other.reports
