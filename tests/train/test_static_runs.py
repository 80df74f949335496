"""Real processes over gloo: all recipes, kills, stops, damage, disagreement."""

import math
import os
import random
import signal

import pytest
from worker_processes import THREE_WORKERS, events, final_weights, run, said, summary

from isthmus.recipes import RECIPES
from isthmus.transport.peers import ring_bytes

pytestmark = pytest.mark.processes


@pytest.fixture(params=[*(f"two {name}" for name in RECIPES.names()), *(f"three {name}" for name in THREE_WORKERS)])
def finished(request):
    """The folder of every run that nothing befell."""
    number, name = request.param.split()
    return request.getfixturevalue(f"{number}_workers") / name


def test_the_loss_falls(finished):
    losses = [event["loss"] for event in events(finished, 0, "step")]
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert summary(finished)["eval_loss"] < math.log(256) - 0.2


def test_identity_34_anchors_are_equal(finished):
    hashes = summary(finished)["anchor_hash"].values()
    assert len(hashes) in (2, 3)
    assert len(set(hashes)) == 1


def test_the_summary_is_the_sum_of_the_metrics(finished):
    joined = summary(finished)
    for worker in range(joined["workers"]):
        syncs = events(finished, worker, "sync")
        assert len(syncs) == joined["num_syncs"]
        assert all(sync["committed"] and sync["num_peers"] == joined["workers"] for sync in syncs)
        assert sum(sync["sent_bytes"] for sync in syncs) == joined["sent_bytes"][worker]
        assert joined["hidden_seconds"][worker] <= joined["sync_seconds"][worker]


def test_only_worker_0_evaluates(finished):
    assert [event["step"] for event in events(finished, 0, "eval")] == [10, 20, 30]
    assert events(finished, 1, "eval") == []


@pytest.mark.parametrize("number", ["two", "three"])
def test_identity_35_ddp_sends_what_a_ring_sends(request, number):
    joined = summary(request.getfixturevalue(f"{number}_workers") / "ddp")
    assert (
        joined["sent_bytes"] == [30 * ring_bytes(4 * joined["num_parameters"], joined["workers"])] * joined["workers"]
    )


def test_every_recipe_sends_less_than_ddp(finished):
    if finished.name != "ddp":
        assert summary(finished)["sent_bytes"][0] < summary(finished.parent / "ddp")["sent_bytes"][0]


def same_run(folder, expected, num_workers=2):
    """Metrics (without times) and every tensor of the last checkpoint, bit for bit."""
    assert summary(folder)["anchor_hash"] == summary(expected)["anchor_hash"]
    for worker in range(num_workers):
        assert events(folder, worker) == events(expected, worker)
        assert final_weights(folder, worker) == final_weights(expected, worker)


@pytest.mark.parametrize(("name", "number"), [("sparseloco", 2), ("streaming", 3)])
def test_identity_37_killed_at_a_random_step_and_resumed_nothing_differs(request, tmp_path, name, number):
    worker, step = random.randrange(number), random.randrange(1, 31)
    recipe = f"outer.recipe={name}"
    codes = run(tmp_path, recipe, num_workers=number, signal_before_step=(worker, step, signal.SIGKILL))
    assert codes[worker] == -signal.SIGKILL
    again = run(tmp_path, recipe, num_workers=number, resume=True)
    assert again == [0] * number, f"worker {worker} before step {step}"
    expected = request.getfixturevalue({2: "two_workers", 3: "three_workers"}[number])
    same_run(tmp_path, expected / name, number)


def test_a_damaged_file_is_named_and_all_use_the_checkpoint_before_it(two_workers, tmp_path):
    recipe = "outer.recipe=sparseloco"
    run(tmp_path, recipe, signal_before_step=(0, 24, signal.SIGKILL))
    damaged = tmp_path / "checkpoints/step-00000021/worker-1/state.safetensors"
    os.truncate(damaged, damaged.stat().st_size // 2)
    assert run(tmp_path, recipe, resume=True) == [0, 0]
    assert f"checkpoint refused: {damaged} has " in said(tmp_path, 1)
    assert "refused" not in said(tmp_path, 0)
    assert "step 15/30" in said(tmp_path, 0)  # after step 14
    same_run(tmp_path, two_workers / "sparseloco")


@pytest.mark.parametrize("name", ["streaming", "ddp"])
def test_sigterm_to_one_worker_stops_all_after_the_same_step(two_workers, tmp_path, name):
    recipe = f"outer.recipe={name}"
    assert run(tmp_path, recipe, signal_before_step=(1, 12, signal.SIGTERM), step_seconds=0.03) == [0, 0]
    stopped = summary(tmp_path)
    assert not stopped["finished"]
    assert 12 <= stopped["steps"] < 30
    newest = f"step-{stopped['steps']:08d}"
    assert len(list(tmp_path.glob(f"checkpoints/{newest}/worker-*/manifest.json"))) == 2
    assert f"stopped after step {stopped['steps']}; go on with: isthmus train {tmp_path}/config.yaml" in said(
        tmp_path, 0
    )
    assert run(tmp_path, recipe, resume=True) == [0, 0]
    same_run(tmp_path, two_workers / name)


def test_workers_with_different_configurations_name_both_values(tmp_path):
    assert run(tmp_path, "inner.optimizer.lr=0.00{rank}5") == [2, 2]
    for worker in range(2):
        errors = [line for line in said(tmp_path, worker).splitlines() if line.startswith("error: ")]
        assert errors == ["error: workers differ in inner.optimizer.lr: worker 0 has 0.0005, worker 1 has 0.0015"]


def test_fewer_ranks_than_the_configuration_says(tmp_path):
    assert run(tmp_path, workers_said=3) == [2, 2]
    assert "error: the configuration says 3 workers, but 2 ranks started" in said(tmp_path, 0)


@pytest.mark.parametrize("name", ["diloco", "ddp"])
def test_a_lost_worker_is_a_fault_with_a_name(tmp_path, name):
    """Worker 1 is suspended, which looks like a cut cable: no connection breaks."""
    overrides = (f"outer.recipe={name}", "outer.transport.sync_budget_seconds=3")
    assert run(tmp_path, *overrides, signal_before_step=(1, 15, signal.SIGSTOP))[0] == 1
    (fault,) = events(tmp_path, 0, "fault")
    assert "worker 1" in fault["reason"]
