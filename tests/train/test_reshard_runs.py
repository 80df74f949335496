"""Runs that go on with other ranks than they began with: they learn what they would have learnt."""

import json
import shutil
from pathlib import Path

import pytest
from worker_processes import MESHES, Job, losses, run, run_jobs, said, summary

from isthmus.models import CausalLM
from isthmus.recipes import load_config
from isthmus.tools.export import export
from isthmus.train.assemble import build_model_spec, open_data
from isthmus.train.evaluate import evaluate

pytestmark = pytest.mark.processes

STEP = 21  # from where the runs go on
KEPT = "train.keep_checkpoints=99"
# one worker of four ranks; after step 21 a sync is in flight and residuals lie about, elementwise as all else
WIDE = [
    "outer.schedule.overlap_steps=5",
    "outer.merge.type=keep_progress",
    "outer.compressor={type: error_feedback, compressor: {type: cast, format: bfloat16}}",
]
MOVES = {  # name: run, configuration on the new mesh, workers, ranks of all
    "tp to pp": ("tp", [MESHES["pp"]], 2, 4),
    "pp to shard": ("pp", [MESHES["shard"]], 2, 4),
    "wide to shard 4": ("wide", [*WIDE, "mesh.shard=4"], 1, 4),
    "shard to one rank": ("shard", [], 2, 2),
    "wide to shard 2": ("wide", [*WIDE, "mesh.shard=2"], 1, 2),
    "sparseloco to one rank": ("sparseloco", ["outer.recipe=sparseloco"], 2, 2),
}


def back_to(step: int, source: Path, target: Path) -> Path:
    """A copy of a run as it was when it had come to a step."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return target


@pytest.fixture(scope="module")
def runs(meshed, tmp_path_factory) -> dict[str, Path]:
    """The folders of uninterrupted runs, and of those that moved."""
    folder = tmp_path_factory.mktemp("moved")
    wide = Job([*WIDE, "mesh.shard=2", "mesh.tp=2", KEPT, f"train.run_dir={folder / 'wide'}"], workers_said=1)
    assert run_jobs([wide], 4) == [0] * 4
    found = {name: meshed / name for name in (*MESHES, "sparseloco")} | {"wide": folder / "wide"}
    for num_ranks in (4, 2):
        jobs = []
        for name, (source, overrides, workers, ranks) in MOVES.items():
            if ranks == num_ranks:
                found[name] = back_to(STEP, found[source], folder / name)
                jobs.append(Job([KEPT, f"train.run_dir={found[name]}", *overrides], resume=True, workers_said=workers))
        assert run_jobs(jobs, num_ranks) == [0] * num_ranks
    return found


@pytest.mark.parametrize("name", MOVES)
def test_the_run_goes_on_as_if_the_mesh_had_not_changed(runs, name):
    tolerance = 2e-2 if "sparseloco" in name else 1e-5  # its chunks are others now
    for kind in ("step", "eval"):
        before, after = (losses(runs[run], kind, STEP) for run in (MOVES[name][0], name))
        assert after == pytest.approx(before, rel=tolerance)
    hashes = set(summary(runs[name])["anchor_hash"].values())
    assert len(hashes) == 1


def test_what_begins_anew_is_said_once(runs):
    meshes = "a checkpoint of pp 1 x shard 2 x tp 2 ranks on pp 1 x shard 4 x tp 1 ranks"
    line = f"resuming {meshes}; begin anew: random numbers"
    assert [said(runs["wide to shard 4"], rank).count(line) for rank in range(4)] == [1, 0, 0, 0]


def test_the_run_that_moved_had_a_sync_in_flight_and_residuals(runs):
    state = json.loads((runs["wide"] / f"checkpoints/step-{STEP:08d}/worker-0/state.json").read_text())
    assert [sync["fragment"] for sync in state["method"]["in_flight"]] == [0]
    assert [len(fragment["state"]["residual"]) > 0 for fragment in state["method"]["fragments"]] == [True]


def test_another_number_of_workers_is_refused_all_the_same(runs, tmp_path):
    folder = back_to(STEP, runs["shard"], tmp_path / "run")
    assert run(folder, "outer.optimizer.lr=0.6", num_workers=1, resume=True) == [2]
    assert "train.workers is 2 there and 1 here" in said(folder, 0)


def test_the_files_of_a_rank_that_are_gone_are_named(runs, tmp_path):
    folder = back_to(STEP, runs["shard"], tmp_path / "run")
    for path in folder.glob("checkpoints/*/worker-1-rank-1"):
        shutil.rmtree(path)
    assert run(folder, resume=True) == [2, 2]
    assert f"step-{STEP:08d}/worker-1-rank-1/manifest.json cannot be read" in said(folder, 1)
    assert "holds no usable checkpoint that all workers have" in said(folder, 0)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_of_all_ranks_are_exported_as_one_model(meshed, tmp_path, mesh):
    from transformers import AutoModelForCausalLM

    export(meshed / mesh, tmp_path / "model")
    config = load_config(meshed / mesh / "config.yaml")
    data_set = open_data(config, build_model_spec(config))
    batches = data_set.validation(config.inner.batch_size, config.train.eval_batches * config.inner.batch_size)
    model = CausalLM(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert evaluate(model, batches)["loss"] == pytest.approx(losses(meshed / mesh, "eval")[-1], rel=1e-5)
