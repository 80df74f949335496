"""`attach`: every recipe in somebody else's loop, by any transport, stopped and resumed, and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import workers
from tests.local_membership import LocalMembership, LocalRendezvousServer
from tests.recipes import own_loops
from tests.toy import inner_step, sgd, toy_batch, toy_model
from torch import nn
from torch.optim import SGD

from isthmus import attach
from isthmus.compress import Cast
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.float4 import Float4
from isthmus.compress.quantize import Quantize
from isthmus.compress.robust import TrimmedMean
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule, UserError
from isthmus.outer import KeepProgress, Rollback
from isthmus.recipes import RECIPES, Recipe
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.local import Local, LocalWorld, run_workers
from isthmus.transport.torch_dist import TorchDist

# opendiloco and muloco remember nothing that others do not
METHODS = [name for name in RECIPES.names() if name not in ("ddp", "opendiloco", "muloco")]


@pytest.mark.processes
def test_importing_isthmus_alone_does_not_wait_for_torch() -> None:
    code = "import sys, isthmus; assert 'torch' not in sys.modules; from isthmus import attach; assert callable(attach)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What became of runs over gloo that were stopped and resumed: of every method, and of what else is in memory."""
    runs = {name: (name, {}) for name in METHODS}
    runs["offloaded"] = ("streaming", {"offload": "cpu"})
    runs["bfloat16"] = ("sparseloco", {"dtype": torch.bfloat16})
    folder = str(tmp_path_factory.mktemp("saved"))
    ended = workers.run(own_loops.all_resumed, within_seconds=270, runs=list(runs.values()), folder=folder)
    ended = workers.results(ended)
    return {name: [worker[number] for worker in ended] for number, name in enumerate(runs)}


@pytest.mark.processes
@pytest.mark.parametrize("name", [*METHODS, "offloaded", "bfloat16"])
def test_a_resumed_loop_ends_as_one_that_was_not_stopped(name: str, resumed: dict[str, list[dict[str, Any]]]) -> None:
    one, other = resumed[name]
    for worker in (one, other):
        whole, model_first, attached_first = worker["ends"]
        assert whole["inner steps"] == own_loops.STEPS
        assert model_first == whole
        assert attached_first == whole
        assert (worker["in flight"] > 0) == (name in ("streaming", "eager", "dilocox", "offloaded"))
    assert one["ends"][0]["before the last sync"] != other["ends"][0]["before the last sync"]  # each on its own data
    if name != "eager" and name != "dilocox":
        assert one["ends"][0]["anchors"] == other["ends"][0]["anchors"]


@pytest.mark.processes
def test_offloading_changes_no_bit(resumed: dict[str, list[dict[str, Any]]]) -> None:
    assert resumed["offloaded"] == resumed["streaming"]


@pytest.mark.processes
def test_workers_that_differ_are_told_so_when_they_start(tmp_path: Path) -> None:
    one, other = workers.results(workers.run(own_loops.refusals, folder=str(tmp_path)))
    assert one == other
    assert one["weights"] == (
        "worker 1 cannot start from other weights than the rest: load the same ones everywhere before attach, or, to "
        "resume, give it what outer_loop.state_dict() returned: attach(..., state_dict=saved)"
    )
    assert one["saved weights, but no state"] == one["weights"]
    assert one["sharded over both"] == (
        "the model is sharded over 2 ranks: give attach as many ranks_per_worker, or shard it over a mesh of this "
        "worker's own ranks"
    )
    assert "workers differ in schedule: worker 0 has SyncSchedule(" in one["arguments"]
    assert one["saved steps"] == "workers differ in inner steps of the resumed state: worker 0 has 11, worker 1 has 12"


def alone(*arguments: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """An outer loop in a world of one."""
    transport = options.pop("transport", None) or Local(LocalWorld(1), 0)
    return attach(*arguments, model or toy_model(), 100, transport=transport, **options)


def test_every_part_of_a_recipe_can_be_overridden() -> None:
    loop = alone(
        "streaming",
        local_steps=12,
        num_fragments=3,
        overlap_steps=2,
        warm_start_steps=4,
        warm_start_every=2,
        warm_start_lr=1.25,
        compressor=Cast("float16"),
        merge=KeepProgress(),
        optimizer=partial(SGD, lr=0.25),
        split="balanced",
        hash_every=3,
        guard={"max_norm_factor": None},
        rollback={},
        offload="cpu",
    )
    assert loop.state.schedule.planned == SyncSchedule(12, 3, 2, 4, 2, 1.25)
    assert len(loop.state.fragments) == 3
    assert loop.exchange.compressor == Cast("float16")
    assert loop.state.merge == KeepProgress()
    assert loop.state.outer_optimizer.param_groups[0]["lr"] == 0.25
    assert loop.exchange.hash_every == 3
    assert loop.exchange.guard.max_norm_factor is None
    assert loop.state.rollbacks.rollback == Rollback()
    assert loop.state.offload.device == "cpu"
    loop.close()


@pytest.mark.parametrize("aggregation", ["trimmed_mean", {"type": "trimmed_mean", "trim": 1}], ids=["name", "spec"])
def test_an_aggregation_reaches_every_codec_of_the_recipe(aggregation: Any) -> None:
    loop = alone("sparseloco", aggregation=aggregation)
    topk = TopK(keep=4096, chunk=4096, values=Quantize(bits=2, block=64, scale_bits=8))
    assert loop.exchange.compressor == ErrorFeedback(TrimmedMean(topk, trim=1), 0.95)
    loop.close()


def test_components_go_by_name_and_spec_as_in_a_configuration() -> None:
    loop = alone(
        "diloco", compressor="float4", merge={"type": "mix", "alpha": 0.25}, optimizer={"type": "adam", "lr": 0.5}
    )
    assert loop.exchange.compressor == Float4("E3M0")
    assert loop.state.merge.alpha == 0.25
    assert isinstance(loop.state.outer_optimizer, torch.optim.Adam)
    loop.close()


def test_what_is_not_overridden_is_the_recipes_own() -> None:
    loop = alone("streaming", local_steps=50)
    assert loop.state.schedule.planned == SyncSchedule(50, 2, 1, 50, 2)
    loop.close()


def test_a_recipe_follows_the_inner_optimizer_that_is_said(logged: pytest.LogCaptureFixture) -> None:
    starts = []
    for options in ({}, {"inner_optimizer": "muon"}, {"inner_optimizer": "adamw"}):
        loop = alone("muloco", **options)
        starts.append((loop.state.schedule.planned.warm_start_every, loop.state.outer_optimizer.defaults["momentum"]))
        loop.close()
    assert starts == [(8, 0.6), (8, 0.6), (2, 0.8)]
    (said,) = (line for line in logged.messages if "inner optimizer" in line)
    assert said.startswith('attach: muloco counts on Muon as inner optimizer: say inner_optimizer="muon" if it is')
    logged.clear()
    alone("diloco").close()
    assert not any("inner optimizer" in line for line in logged.messages)


def test_a_recipe_of_ones_own() -> None:
    for recipe in (Recipe(SyncSchedule(5)), lambda plan: Recipe(SyncSchedule(plan.local_steps or 5))):
        loop = alone(recipe)
        assert loop.state.schedule.planned == SyncSchedule(5)
        loop.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compresor": Cast()}, "attach has no argument 'compresor': did you mean 'compressor'?"),
        ({"local_step": 5}, "attach has no argument 'local_step': did you mean 'local_steps'?"),
        ({"compressor": "flote4"}, "unknown compressor 'flote4': did you mean 'float4'?"),
        ({"compressor": Float4}, "compressor: expected an instance, a name or {type: name, ...} with one of cast, "),
        ({"compressor": {"type": "float4", "format": "E5"}}, "compressor.format: should be 'E3M0'"),
        ({"merge": 3}, "merge: expected an instance, a name or {type: name, ...} with one of replace, "),
        ({"optimizer": {"type": "sgd", "lr": -1}}, "optimizer: Invalid learning rate: -1"),
        ({"optimizer": sgd(toy_model().parameters())}, "optimizer: expected a name, {type: name, ...} or a function"),
        ({"split": "stirded"}, "unknown split 'stirded': did you mean 'strided'?"),
        ({"num_fragments": 3, "local_steps": 10}, "schedule: local_steps 10 is not divisible by num_fragments 3"),
        ({"local_steps": 0}, "local_steps: should be greater than 0, got 0"),
        ({"overlap_steps": "two"}, "overlap_steps: should be a valid integer"),
        ({"inner_optimizer": "lion"}, "inner_optimizer: should be 'adamw' or 'muon', got 'lion'"),
        ({"offload": "moon"}, "offload: this machine has no device 'moon'"),
        ({"transport": "tourch"}, "unknown transport 'tourch': did you mean 'torchft'?"),
        ({"transport": TorchDist}, "transport: expected an instance, a name or {type: name, ...} with one of "),
        ({"transport": {"type": "torch_dist", "budget": 3}}, "transport.budget: unknown key"),
        ({"transport": "torchft"}, "attach: num_workers is missing: where workers come and go, say how many"),
        ({"state_dict": {"model": {}}}, "attach: state_dict should be what outer_loop.state_dict() returned"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "attach: no parameter of the model requires a gradient"),
        ({"model": [1]}, "attach: the model should be a torch.nn.Module, got list"),
    ],
)
def test_a_wrong_argument_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        alone("streaming", **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_ddp_has_no_outer_loop() -> None:
    with pytest.raises(UserError, match="ddp has no outer loop: wrap the model in torch's DistributedDataParallel"):
        alone("ddp")


def test_the_state_of_another_recipe_is_refused() -> None:
    loop = alone("diloco")
    with pytest.raises(UserError, match="the saved outer state is of another model or another recipe"):
        alone("streaming", local_steps=10, state_dict=loop.state_dict())
    loop.close()


def test_workers_of_a_model_without_blocks_stream_it_in_balanced_fragments() -> None:
    def work(rank: int, transport: Local) -> str:
        model = toy_model()
        optimizer = sgd(model.parameters())
        loop = attach("streaming", model, 12, 4, transport=transport)
        assert len(loop.state.fragments) == 2
        for step in range(12):
            inner_step(model, optimizer, toy_batch(rank, step))
            loop.step()
        loop.finish()
        return loop.anchor_hash()

    one, other = run_workers(LocalWorld(2), work)
    assert one == other


class ElasticWorker:
    """A loop of one's own in an elastic world of threads."""

    STEPS = 20

    def __init__(self, server: LocalRendezvousServer, rank: int, saved: dict[str, Any] | None = None) -> None:
        self.rank, self.model = rank, toy_model()
        self.optimizer = sgd(self.model.parameters())
        if saved:
            self.model.load_state_dict(saved["model"])
        transport = ElasticTransport(LocalMembership(server, f"worker-{rank}"), None, 2, 1, sync_budget_seconds=5.0)
        outer_state = saved and saved["outer_loop"]
        self.loop = attach(
            "diloco", self.model, self.STEPS, 4, transport=transport, warm_start_steps=0, state_dict=outer_state
        )
        self.begun_at = self.loop.state.inner_steps

    def train(self, until: int) -> None:
        while self.loop.state.inner_steps < until:
            inner_step(self.model, self.optimizer, toy_batch(self.rank, self.loop.state.inner_steps))
            self.loop.step()

    def save(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "outer_loop": self.loop.state_dict()})

    def end(self) -> str:
        while self.loop.state.phase != "finished":
            self.train(self.STEPS)
            self.loop.finish()
        self.loop.close()
        return self.loop.anchor_hash()


def test_elastic_workers_that_all_resume_go_on_from_where_they_were() -> None:
    def work(rank: int, transport: Local) -> tuple[int, str, str]:
        worker = ElasticWorker(servers[0], rank)
        worker.train(6)
        saved, anchors = worker.save(), worker.loop.anchor_hash()
        worker.end()
        resumed = ElasticWorker(servers[1], rank, saved)
        assert resumed.loop.anchor_hash() == anchors
        return resumed.begun_at, resumed.end(), anchors

    servers = [LocalRendezvousServer(grace_seconds=10.0) for _ in range(2)]
    one, other = run_workers(LocalWorld(2), work)
    assert one == other
    assert one[0] == 6
    assert one[1] != one[2]


def test_an_elastic_worker_that_resumes_goes_on_from_where_the_others_are() -> None:
    stopped, returning = threading.Event(), threading.Event()

    def work(rank: int, transport: Local) -> tuple[int, str]:
        worker = ElasticWorker(server, rank)
        worker.train(6)
        if rank == 1:
            saved = worker.save()
            worker.loop.close()
            stopped.set()
            assert returning.wait(20)
            worker = ElasticWorker(server, rank, saved)
        else:
            assert stopped.wait(20)
            worker.train(13)  # alone
            returning.set()
            while server.alive != {"worker-0", "worker-1"}:
                time.sleep(0.01)
        return worker.begun_at, worker.end()

    server = LocalRendezvousServer(grace_seconds=10.0)
    (_, one), (begun_at, other) = run_workers(LocalWorld(2), work)
    assert begun_at >= 13
    assert one == other
