"""Whole runs of real processes whose start averages gradients."""

import signal
from pathlib import Path

import pytest
from test_gan_runs import GAN
from test_static_runs import same_run
from worker_processes import MESHES, Job, events, losses, run, run_jobs, said, summary

pytestmark = pytest.mark.processes

START = ["outer.schedule={warm_start_steps: 16, warm_start_every: 6}"]
# rounds at random, by numbers that a resumed run has to go on with
AT_RANDOM = ["outer.recipe=streaming", "outer.gradient_compressor={type: quantize, bits: 4, rounding: stochastic}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    kinds = {"random": [*AT_RANDOM, *START], "diloco": ["outer.recipe=diloco", *START], "ddp": ["outer.recipe=ddp"]}
    jobs = [Job([f"train.run_dir={folder / name}", *overrides]) for name, overrides in kinds.items()]
    assert run_jobs(jobs, 2) == [0, 0]
    return folder


def test_the_start_is_that_of_ddp(runs):
    first = [values["grad_norm"] for values in events(runs / "diloco", 0, "step")[:15]]
    assert first == pytest.approx([values["grad_norm"] for values in events(runs / "ddp", 0, "step")[:15]], rel=1e-3)


def test_every_step_of_it_and_no_other_averages_gradients(runs):
    syncs = events(runs / "diloco", 0, "sync")
    assert [sync["step"] for sync in syncs if sync["fragment"] == "gradients"] == [*range(1, 17)]
    assert [sync["step"] for sync in syncs if sync["fragment"] == "all"] == [6, 12, 16, 26, 30]
    assert summary(runs / "diloco")["sent_bytes"][0] == sum(sync["sent_bytes"] for sync in syncs)


def test_killed_within_it_and_resumed_nothing_differs(runs, tmp_path):
    codes = run(tmp_path, *AT_RANDOM, *START, signal_before_step=(1, 10, signal.SIGKILL))
    assert codes[1] == -signal.SIGKILL
    assert run(tmp_path, *AT_RANDOM, *START, resume=True) == [0, 0]
    same_run(tmp_path, runs / "random")


@pytest.mark.parametrize("mesh", MESHES)
def test_workers_of_two_ranks_learn_what_workers_of_one_rank_learn(runs, tmp_path, mesh):
    options = {"num_workers": 4, "workers_said": 2}
    assert run(tmp_path, "outer.recipe=diloco", MESHES[mesh], *START, **options) == [0] * 4, said(tmp_path, 0)
    assert len(set(summary(tmp_path)["anchor_hash"].values())) == 1
    for kind in ("step", "eval"):
        assert losses(tmp_path, kind) == pytest.approx(losses(runs / "diloco", kind), rel=2e-4)


def test_both_networks_of_a_gan_average_theirs(tmp_path):
    assert run(tmp_path, *GAN, "outer.recipe=diloco", *START, "train.steps=8", "train.eval_every=8") == [0, 0]
    of_step = [sync["sent_bytes"] for sync in events(tmp_path, 0, "sync") if sync["step"] == 2]
    assert len(of_step) == 3  # the discriminator steps twice
    assert of_step[0] == of_step[1] != of_step[2]
    assert len(set(summary(tmp_path)["anchor_hash"].values())) == 1
