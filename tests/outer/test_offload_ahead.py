"""Offloaded state travels ahead of the step that needs it and back behind it, and nobody ever sees the half of it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from benchmarks.live_bytes import CountedOffload, TwoPlaces
from tests.outer.test_offload import BLOCKS, METHODS, MODEL_BYTES, Blocks, peaks, run
from tests.toy import Worker, nesterov
from typing_extensions import override

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule, split_strided
from isthmus.core.flatten import flatten
from isthmus.core.streams import Copying, CopyStream
from isthmus.outer import Eager, KeepProgress, Merge, Mix, Offload, OuterLoop, Replace
from isthmus.outer import offload as offload_module
from isthmus.tools.live_bytes import LiveBytesMode
from isthmus.transport.local import Local, LocalWorld


class LateCopying(Copying):
    """Copies that are made when somebody waits for them, or asks for the second time whether they are done."""

    def __init__(self, stream: LateStream, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.stream, self.sources, self.targets, self.asked = stream, sources, targets, False

    @property
    @override
    def done(self) -> bool:
        if not self.asked:
            self.asked = True
            return False
        self.wait()
        return True

    @override
    def join(self) -> None:
        self.wait()

    @override
    def wait(self) -> None:
        with self.stream.lock, torch.no_grad():
            while self in self.stream.queue:
                first = self.stream.queue.pop(0)
                for source, target in zip(first.sources, first.targets, strict=True):
                    target.copy_(source)
                first.sources = first.targets = []  # as it is on a GPU, an event holds no memory


class LateStream(CopyStream):
    """A stream as slow as a GPU's may be: until its copies are made, in order, their targets hold no numbers."""

    def __init__(self, device: torch.device) -> None:
        self.queue: list[LateCopying] = []
        self.lock = threading.Lock()

    @override
    def copy(self, sources: Any, targets: Any) -> LateCopying:
        with self.lock:
            for target in targets:
                target.detach().fill_(torch.nan)
            self.queue.append(LateCopying(self, sources, targets))
            return self.queue[-1]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "CopyStream", LateStream)


Snapshots = dict[tuple[int, int], list[torch.Tensor]]


def after_every_step(method: dict[str, Any], offload: Offload) -> Snapshots:
    """What every worker's state dict held, and its parameters."""
    seen: Snapshots = {}

    def note(rank: int, step: int, worker: Worker) -> None:
        _, tensors = flatten(copy.deepcopy(worker.loop.state_dict()))
        seen[rank, step] = [*tensors, worker.params.clone()]

    run(method, offload, each_step=note, hash_every=1)
    return seen


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method["merge"]).__name__)
def test_whoever_reads_after_any_step_reads_a_whole_state(method, late) -> None:
    plain, offloaded = after_every_step(method, Offload()), after_every_step(method, Offload("cpu"))
    assert plain.keys() == offloaded.keys()
    for when, tensors in plain.items():
        assert len(tensors) == len(offloaded[when])
        assert all(torch.equal(a, b) for a, b in zip(tensors, offloaded[when], strict=True)), when


def make_loop(
    schedule: SyncSchedule, offload: Offload, merge: Merge | None = None, device: str = "cpu"
) -> tuple[Blocks, OuterLoop]:
    torch.manual_seed(0)
    model = Blocks().to(device)
    fragments = split_strided(model, schedule.num_fragments)
    method = {"compressor": ErrorFeedback(Quantize(4)), "outer_optimizer": nesterov, "merge": merge or KeepProgress()}
    loop = OuterLoop(fragments, schedule, transport=Local(LocalWorld(1), 0), offload=offload, hash_every=1, **method)
    return model, loop


@torch.no_grad()
def train(model: Blocks, loop: OuterLoop, steps: int) -> None:
    for _ in range(steps):
        for param in model.parameters():
            param.add_(param.cos(), alpha=0.01)
        loop.step()
        for sync in loop.state.in_flight.values():
            sync.result  # noqa: B018 (waits, so that the next step is the same however fast threads are)


class LateFetches(LiveBytesMode):
    """Counts what is fetched only when it is needed."""

    count = 0
    live: TwoPlaces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_to_copy" and self.live.is_offloaded(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


SCHEDULES = {
    "flying": (SyncSchedule(8, 2, 2), Mix(0.5)),
    "kept": (SyncSchedule(8, 2, 2), KeepProgress()),
    "delayed": (SyncSchedule(6, 1, 6), KeepProgress()),
    "eager": (SyncSchedule(6, 1, 6), Eager()),
    "blocking": (SyncSchedule(6, 2, 0), Replace()),
}


@pytest.mark.parametrize(("schedule", "merge"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_step_before_fetches_what_a_step_needs(schedule: SyncSchedule, merge: Any) -> None:
    offload = CountedOffload("cpu")
    model, loop = make_loop(schedule, offload, merge)
    train(model, loop, 16)
    fetches = LateFetches(offload.live)
    fetched_before = set()
    with fetches:
        for step in range(17, 17 + 2 * schedule.local_steps):
            due = [*schedule.finishes(step), *schedule.begins(step)]
            near = [fragment for fragment in loop.state.fragments if loop.state.offload.keeps_near(fragment)]
            assert near == [loop.state.fragments[index] for index in due[:1]]
            fetched_before.update(due)
            train(model, loop, 1)
    assert fetches.count == 0
    assert fetched_before == set(range(schedule.num_fragments))


def test_offloaded_state_goes_back_into_the_memory_that_it_came_from(late) -> None:
    model, loop = make_loop(SyncSchedule(8, 2, 2), Offload("cpu"))
    train(model, loop, 12)  # both fragments have momentum
    places = set()
    for _ in range(3):
        train(model, loop, 8)
        loop.state.offload.free(wait=True)
        anchors = [anchor for fragment in loop.state.fragments for anchor in fragment.anchor]
        momenta = [loop.state.outer_optimizer.state[anchor]["momentum_buffer"] for anchor in anchors]
        places.add(tuple(tensor.data_ptr() for tensor in [*anchors, *momenta]))
    assert len(places) == 1
    assert len(set(*places)) == 2 * BLOCKS


def test_two_fragments_are_never_near_however_late_copies_are(late) -> None:
    """The next one waits for its step while the last one is leaving."""
    at_rest, peak, offloaded = peaks(CountedOffload("cpu"))
    _, plain_peak, _ = peaks(CountedOffload())
    assert (at_rest, offloaded) == (2 / BLOCKS, 3)
    assert peak <= plain_peak - 3 * (BLOCKS - 1) / BLOCKS


@pytest.mark.parametrize("models", [0.9, 1, 1.9, 2])
def test_what_finds_no_memory_beside_inner_steps_is_fetched_when_it_is_needed(models, monkeypatch) -> None:
    """A capture needs the anchor, a finish the momentum, too (the mean is not there yet), but for the first one."""

    def unused_bytes(device: torch.device) -> float:
        return models * MODEL_BYTES - loop.state.offload._fitting_bytes

    monkeypatch.setattr(offload_module, "unused_bytes", unused_bytes)
    schedule = SyncSchedule(4, 1, 1)
    expected, plain = make_loop(schedule, Offload(), Mix(0.5))
    model, loop = make_loop(schedule, Offload("cpu"), Mix(0.5))
    ahead = set()
    for step in range(1, 22):
        train(expected, plain, 1)
        train(model, loop, 1)
        if step > 6 and loop.state.offload.keeps_near(loop.state.fragments[0]):
            ahead.add(step % 4)
    assert ahead == {step for step, needed in ((3, 1), (0, 2)) if models >= needed}
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("steps", [2, 3, 4, 5])  # between two syncs, about to finish one, just after it
def test_a_state_may_be_loaded_while_another_one_is_on_its_way(steps, late) -> None:
    results = []
    for offload in (Offload(), Offload("cpu")):
        model, loop = make_loop(SyncSchedule(4, 1, 1), offload)
        train(model, loop, 10)
        saved, weights = copy.deepcopy(loop.state_dict()), copy.deepcopy(model.state_dict())
        train(model, loop, steps)
        loop.load_state_dict(saved)
        model.load_state_dict(weights)
        train(model, loop, 7)
        loop.finish()
        results.append(flatten(loop.state_dict())[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])
@pytest.mark.parametrize("schedule", [SyncSchedule(8, 2, 2), SyncSchedule(6, 1, 6), SyncSchedule(6, 2, 0)], ids=str)
def test_a_device_that_is_behind_finds_everything_in_time(schedule: SyncSchedule, device: str) -> None:
    """What is read after some steps, and what comes of it, as without offload; work queues up before every step."""
    seen: list[list[torch.Tensor]] = []
    for offload in (Offload(), Offload("cpu")):
        model, loop = make_loop(schedule, offload, device=device)
        burden = torch.ones(4096, 4096, device=device) if device == "cuda" else torch.ones(1, 1)
        seen.append([])
        for step in range(40):
            for _ in range(10):
                burden = (burden @ burden).clamp_(0, 1)
            train(model, loop, 1)
            if step % 5 == 0:
                seen[-1] += [tensor.cpu() for tensor in flatten(copy.deepcopy(loop.state_dict()))[1]]
        loop.finish()
        anchors = [anchor for fragment in loop.state.fragments for anchor in fragment.anchor]
        seen[-1] += [tensor.detach().cpu() for tensor in [*model.parameters(), *anchors]]
    assert {(anchor.device.type, anchor.is_pinned()) for anchor in anchors} == {("cpu", torch.cuda.is_available())}
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
