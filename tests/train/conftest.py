"""Runs that several tests look at."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from worker_processes import MESHES, NOT_ELEMENTWISE, THREE_WORKERS, Job, recipe, run_jobs, said

from isthmus.recipes import RECIPES


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run a recipe with two workers, in folders called after the recipes."""
    return _run_all(RECIPES.names(), 2, tmp_path_factory.mktemp("two-workers"))


@pytest.fixture(scope="session")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with three workers, an odd count, for each way in which bytes go: a ring, two shots, one shot."""
    return _run_all(THREE_WORKERS, 3, tmp_path_factory.mktemp("three-workers"))


@pytest.fixture(scope="session")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers of two ranks: `diloco` on every mesh, other recipes on FSDP2. All checkpoints are kept."""
    folder = tmp_path_factory.mktemp("meshed")
    runs = {name: [mesh] for name, mesh in MESHES.items()}
    runs |= {name: [MESHES["shard"], *recipe(name)] for name in ("streaming", *NOT_ELEMENTWISE)}
    common = "train.keep_checkpoints=99"
    jobs = [Job([common, f"train.run_dir={folder / name}", *run], workers_said=2) for name, run in runs.items()]
    assert run_jobs(jobs, 4) == [0] * 4, said(folder / "shard", 0)
    return folder


def _run_all(names: Sequence[str], num_workers: int, folder: Path) -> Path:
    """The same processes run all recipes, one after the other."""
    jobs = [Job([*recipe(name), f"train.run_dir={folder / name}"]) for name in names]
    assert run_jobs(jobs, num_workers) == [0] * num_workers
    return folder
