"""Workers of several ranks, whole runs of real processes: they learn what workers of one rank learn."""

import json
import random
import signal
from pathlib import Path

import pytest
from worker_processes import MESHES, NOT_ELEMENTWISE, events, losses, run, said, summary

from isthmus.core import UserError
from isthmus.recipes import load_config

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NAMES = ("worker-0", "worker-0-rank-1", "worker-1", "worker-1-rank-1")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_worker_of_two_ranks_learns_what_one_of_one_rank_learns(meshed, two_workers, mesh):
    for kind in ("step", "eval"):
        assert losses(meshed / mesh, kind) == pytest.approx(losses(two_workers / "diloco", kind), rel=2e-4)
    norms = [[event["norm"] for event in events(run, 0, "sync")] for run in (meshed / mesh, two_workers / "diloco")]
    # what tensor parallelism does not split (norms, some biases) counts once a rank
    assert norms[0] == pytest.approx(norms[1], rel=2e-2 if mesh == "tp" else 1e-3)


@pytest.mark.parametrize("name", [*MESHES, "streaming", *NOT_ELEMENTWISE])
def test_anchors_are_equal_on_all_workers(meshed, name):
    hashes = summary(meshed / name)["anchor_hash"]
    assert len(hashes) == 2
    assert len(set(hashes.values())) == 1


@pytest.mark.parametrize("name", ["streaming", *NOT_ELEMENTWISE])
def test_other_methods_learn_as_much(meshed, two_workers, name):
    assert losses(meshed / name, "eval")[-1] < 1.02 * losses(two_workers / name, "eval")[-1]


@pytest.mark.parametrize("mesh", ["shard", "pp"])
def test_ranks_that_hold_disjoint_parts_send_together_what_one_sends(meshed, two_workers, mesh):
    whole, parts = summary(two_workers / "diloco"), summary(meshed / mesh)
    assert parts["num_parameters"] == whole["num_parameters"]
    reports = 60 * parts["num_syncs"]  # each rank reports and votes
    assert whole["sent_bytes"][0] <= parts["sent_bytes"][0] <= whole["sent_bytes"][0] + reports
    syncs = [sum(event["sent_bytes"] for event in events(meshed / mesh, worker, "sync")) for worker in (0, 1)]
    assert syncs == parts["sent_bytes"]


def test_killed_at_a_random_step_and_resumed_nothing_differs(meshed, tmp_path):
    rank, step = random.randrange(4), random.randrange(2, 31)
    options = {"num_workers": 4, "workers_said": 2}
    codes = run(tmp_path, MESHES["shard"], signal_before_step=(rank, step, signal.SIGKILL), **options)
    assert codes[rank] == -signal.SIGKILL
    assert run(tmp_path, MESHES["shard"], resume=True, **options) == [0] * 4, f"rank {rank} before step {step}"
    assert summary(tmp_path)["anchor_hash"] == summary(meshed / "shard")["anchor_hash"]
    for name in NAMES:
        assert final_weights(tmp_path, name) == final_weights(meshed / "shard", name)


def final_weights(folder: Path, name: str) -> bytes:
    newest = max((folder / "checkpoints").glob(f"step-*/{name}"))
    assert json.loads((newest / "manifest.json").read_text())["mesh"]["shard"] == 2
    return (newest / "state.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.shard=0"], "mesh: shard is 0; choose at least 1"),
        (["mesh.sharde=2"], "mesh.sharde: unknown key"),
        (["mesh=2"], "mesh: expected keys and values, got 2"),
        (["mesh.shard=3"], "inner.batch_size: 8 is no multiple of the 3 shards"),
        (["mesh.tp=2", "outer.recipe=ddp"], "mesh: ddp is for workers of one rank"),
        (["mesh.tp=2", "inner.micro_batch_size=auto"], "inner.micro_batch_size: auto is for workers of one rank"),
        (
            ["mesh.shard=2", "inner.optimizer={type: adversarial}"],
            "mesh: adversarial steps are for workers of one rank",
        ),
        (["mesh.pp=2", "inner.compile=true"], "inner.compile: pipeline stages are not compiled"),
    ],
)
def test_what_a_worker_of_several_ranks_cannot_do(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(ROOT / "examples/tiny.yaml", overrides, 2)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("mesh", "workers", "ranks", "message"),
    [
        ("mesh.shard=2", 2, 3, "the configuration says 2 workers of 2 ranks, but 3 ranks started"),
        ("mesh.pp=3", 1, 3, "mesh: 3 pipeline stages are too many for a model of 2 layers; lower mesh.pp"),
        ("mesh.tp=4", 1, 4, "heads"),
    ],
)
def test_a_mesh_that_does_not_fit(tmp_path, mesh, workers, ranks, message):
    assert run(tmp_path, mesh, num_workers=ranks, workers_said=workers) == [2] * ranks
    assert [message in said(tmp_path, rank) for rank in range(ranks)] == [True] * ranks
