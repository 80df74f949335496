"""A residual network on the digits: real worker processes, several methods, batch norm, resuming."""

from __future__ import annotations

import shutil

import pytest
import torch
from toy_runs import assert_resumes_alike, toy_config
from worker_processes import Job, events, run_jobs, said, summary

from isthmus.train.checkpoint import Checkpoints
from isthmus.train.worker import train

pytestmark = pytest.mark.processes

RECIPES = ("streaming", "sparseloco", "ddp")  # several fragments, Muon, no outer loop
STEPS = 48
OPTIONS = [
    "model={type: resnet, image_size: 16, num_channels: 1}",
    "data={type: images}",
]
RUN = [
    *OPTIONS,
    "inner.batch_size=32",
    "inner.optimizer.lr=1e-2",
    "outer.schedule.local_steps=4",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.eval_batches=8",
    f"train.checkpoint_every={STEPS}",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run a recipe with two worker processes, in folders called after the recipes."""
    folder = tmp_path_factory.mktemp("vision")
    jobs = [Job([*RUN, f"outer.recipe={name}", f"train.run_dir={folder / name}"]) for name in RECIPES]
    sharded = [*RUN, "train.steps=12", "outer.recipe=sparseloco", "mesh.shard=2", f"train.run_dir={folder / 'sharded'}"]
    jobs.append(Job(sharded, workers_said=1))
    assert run_jobs(jobs, 2) == [0, 0], said(folder / RECIPES[0], 0)
    return folder


def statistics(run_dir, worker: int) -> dict[str, torch.Tensor]:
    model = Checkpoints(run_dir / "checkpoints", worker, {}).load(STEPS)["model"]
    return {name: tensor for name, tensor in model.items() if "running_" in name}


@pytest.mark.parametrize("name", RECIPES)
def test_digits_are_learnt(runs, name):
    values = summary(runs / name)["evaluation"]
    assert values["accuracy"] > 0.6, values
    losses = [event["loss"] for event in events(runs / name, 0, "step")]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("name", RECIPES)
def test_anchors_are_equal_and_running_statistics_too_where_there_is_an_outer_loop(runs, name):
    assert len(set(summary(runs / name)["anchor_hash"].values())) == 1
    first, second = (statistics(runs / name, worker) for worker in range(2))
    assert len(first) == 18
    equal = [torch.equal(first[key], second[key]) for key in first]
    assert not any(equal) if name == "ddp" else all(equal)
    assert all(bool((tensor.abs() > 1e-3).any()) for tensor in first.values())


def test_a_worker_of_two_ranks_learns_and_measures(runs):
    """FSDP2: Muon sees whole filters, and evaluation gathers them."""
    values = summary(runs / "sharded")["evaluation"]
    assert values["accuracy"] > 0.15
    assert values["loss"] < 2.5


def test_identity_37_resumed_after_any_step_nothing_differs(tmp_path):
    """Crops, running statistics and the momentum of filters included."""
    steps = ("train.checkpoint_every=3", "train.keep_checkpoints=99", "train.eval_every=6")
    assert_resumes_alike(toy_config(tmp_path, *OPTIONS, *steps, "outer.recipe=sparseloco"), (9, 3, 0))
    assert {"accuracy", "loss"} < set(events(tmp_path / "run", 0, "eval")[0])


def test_more_bad_images_may_be_allowed_when_a_run_goes_on(tmp_path):
    train(toy_config(tmp_path, *OPTIONS))
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    part = train(toy_config(tmp_path, *OPTIONS, "data.max_bad_samples=20"), resume=True)
    assert part["finished"]
