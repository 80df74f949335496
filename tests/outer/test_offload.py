"""Offloaded outer state: the same results, and only one fragment's beside the parameters."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.live_bytes import CountedOffload, follow
from tests.toy import Worker, inner_step, nesterov, sgd, toy_batch, toy_model, toy_run
from torch import nn
from torch.utils._pytree import tree_leaves

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule, UserError, split_balanced, split_strided
from isthmus.core.flatten import flatten
from isthmus.outer import Eager, KeepProgress, Mix, Offload, OuterLoop, Replace
from isthmus.recipes import load_config
from isthmus.tools.live_bytes import LiveBytesMode
from isthmus.transport.local import Local, LocalWorld, run_workers

BLOCKS, WIDTH = 8, 64
MODEL_BYTES = 4 * BLOCKS * WIDTH**2
COPIES = ("copy_", "_to_copy", "clone", "detach", "alias", "view", "empty_like")
METHODS: list[dict[str, Any]] = [
    {"schedule": SyncSchedule(3), "merge": Replace(), "compressor": ErrorFeedback(Quantize(4, 8))},
    {"schedule": SyncSchedule(4, num_fragments=2, overlap_steps=1), "merge": Mix(0.5), "compressor": Quantize(4, 8)},
    {"schedule": SyncSchedule(4, overlap_steps=4), "merge": Eager(), "compressor": ErrorFeedback(Quantize(8, 8))},
    {"schedule": SyncSchedule(4, overlap_steps=4, warm_start_steps=2), "merge": KeepProgress()}
    | {"compressor": ErrorFeedback(LowRank(1, factors=Quantize(8, 4), window=2))},
]


class Apart(LiveBytesMode):
    """Makes one device stand for two: what is offloaded can be copied, but not computed with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in COPIES:
            operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            assert not any(map(self.live.is_offloaded, operands)), f"{func} of an offloaded tensor"
        return super().__torch_dispatch__(func, types, args, kwargs)


def world_that_refuses() -> LocalWorld:
    world = LocalWorld(2)
    world.refuse_commit(1)
    return world


def run(method: dict[str, Any], offload: Offload, **more: Any) -> list[Worker]:
    split = partial(split_balanced, num_fragments=method["schedule"].num_fragments)
    return toy_run(world=world_that_refuses(), steps=17, split=split, offload=offload, **method, **more)


def assert_equal(one: Worker, other: Worker) -> None:
    """Everything, bit for bit."""
    (_, mine), (_, theirs) = (flatten(worker.loop.state_dict()) for worker in (one, other))
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(one.params, other.params)
    assert [replace(report, seconds=0) for report in one.reports] == [replace(r, seconds=0) for r in other.reports]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method["merge"]).__name__)
def test_nothing_is_computed_with_offloaded_tensors(method) -> None:
    offload = CountedOffload("cpu")

    def watch(rank: int, step: int, worker: Worker) -> None:
        if step == 1:
            follow(worker.loop, Apart(offload.live))
            Apart(offload.live).__enter__()  # this worker's thread ends with the run

    for one, other in zip(run(method, Offload()), run(method, offload, each_step=watch), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method["merge"]).__name__)
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_saved_run_goes_on_where_outer_state_is_kept_elsewhere(method, offload) -> None:
    saved: dict[int, Any] = {}

    def save(rank: int, step: int, worker: Worker) -> None:
        if step == 9:
            saved[rank] = copy.deepcopy((worker.model.state_dict(), worker.loop.state_dict()))

    def resume(rank: int, transport: Any) -> Worker:
        model = toy_model(seed=1)
        loop = OuterLoop(
            split_balanced(model, method["schedule"].num_fragments),
            transport=transport,
            outer_optimizer=nesterov,
            offload=Offload(None if offload else "cpu"),
            **method,
        )
        worker = Worker(model, sgd(model.parameters()), loop)
        model.load_state_dict(saved[rank][0])
        loop.load_state_dict(saved[rank][1])
        for step in range(9, 17):
            inner_step(model, worker.optimizer, toy_batch(rank, step))
            loop.step()
        return worker

    whole = run(method, Offload(offload), each_step=save)
    for one, other in zip(whole, run_workers(world_that_refuses(), resume), strict=True):
        assert torch.equal(one.params, other.params)
        assert torch.equal(one.anchor, other.anchor)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))


def peaks(offload: CountedOffload) -> tuple[float, float, float]:
    """In models, once all have momentum: most beside the model between syncs, most at any moment, and offloaded."""
    model, live = Blocks(), offload.live
    schedule = SyncSchedule(BLOCKS, num_fragments=BLOCKS)
    fragments = split_strided(model, BLOCKS)
    live.add([*model.parameters(), *(anchor for fragment in fragments for anchor in fragment.anchor)])
    method = {"compressor": ErrorFeedback(Quantize(4)), "outer_optimizer": nesterov, "hash_every": 0}
    loop = OuterLoop(fragments, schedule, transport=Local(LocalWorld(1), 0), offload=offload, **method)
    follow(loop, LiveBytesMode(live))
    at_rest = 0
    with LiveBytesMode(live):
        for step in range(4 * BLOCKS):
            if step == 2 * BLOCKS:
                live.peak = 0
            for param in model.parameters():
                param.data.mul_(0.999)
            loop.step()
            loop._thread.run(lambda: None)  # which has let go of its last sync then
            at_rest = max(at_rest, live.now())
    loop.close()
    return at_rest / MODEL_BYTES - 1, live.peak / MODEL_BYTES - 1, live.now_offloaded() / MODEL_BYTES


def test_only_one_fragment_has_its_outer_state_beside_the_parameters() -> None:
    """Anchor, momentum and residual of one of eight, and what a sync works with; between syncs what the next needs."""
    at_rest, plain_peak, _ = peaks(CountedOffload())
    assert at_rest == 3
    at_rest, peak, offloaded = peaks(CountedOffload("cpu"))
    assert (at_rest, offloaded) == (2 / BLOCKS, 3)
    assert peak <= plain_peak - 3 * (BLOCKS - 1) / BLOCKS


def after_steps_on(device: str, offload: Offload) -> list[torch.Tensor]:
    """Local parameters and anchors of a worker whose syncs are in flight during some steps."""
    torch.manual_seed(0)
    model = Blocks().to(device)
    schedule = SyncSchedule(4, num_fragments=2, overlap_steps=1)
    method = {"compressor": ErrorFeedback(Quantize(4)), "outer_optimizer": nesterov, "merge": Mix(0.5)}
    transport = Local(LocalWorld(1), 0)
    loop = OuterLoop(split_strided(model, 2), schedule, transport=transport, offload=offload, hash_every=1, **method)
    for _ in range(21):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.cos(), alpha=0.01)
        loop.step()
    loop.close()
    loop.state.offload.put_all()
    return [*model.parameters(), *(anchor for fragment in loop.state.fragments for anchor in fragment.anchor)]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])
def test_on_every_device_there_is_the_result_is_the_same_bitwise(device: str) -> None:
    plain, offloaded = after_steps_on(device, Offload()), after_steps_on(device, Offload("cpu"))
    assert {tensor.device.type for tensor in offloaded[BLOCKS:]} == {"cpu"}
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(plain, offloaded, strict=True))


@pytest.mark.parametrize("device", ["cuda:7", "meta", "gpu", "hpu", "xla", ""])
def test_a_device_that_does_not_exist_is_one_clear_line(device: str) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() > 7:
        pytest.skip("it exists")
    with pytest.raises(UserError, match=f"no device '{device}': use cpu"):
        Offload(device)
    with pytest.raises(UserError, match="use cpu"):
        load_config(overrides=[f"outer.offload='{device}'"])


def test_the_configuration_names_the_device() -> None:
    assert load_config(overrides=["outer.offload=cpu"]).outer.offload == "cpu"
    assert load_config().outer.offload is None
    with pytest.raises(UserError, match="outer.offload"):
        load_config(overrides=["outer.offload=7"])
