"""Runs of real processes that go back by themselves when a worker has blown the model up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launched import RUN, events, finish
from tests.program import Program

pytestmark = pytest.mark.processes

WORKERS = range(3)
EXPLODED_LOSS = 50.0


def launch(folder: Path, engine: str, at: list[int], rollback: dict[str, Any] | None) -> tuple[int | None, str, str]:
    model = RUN["model"] | {"path": "tests.train.tiny:Explosive", "arguments": {"hidden_size": 16, "at": at}}
    outer = RUN["outer"] | {"transport": {"type": engine, "sync_budget_seconds": 20.0}, "hash_every": 1}
    outer |= {"guard": {"max_norm_factor": None}, "rollback": rollback, "optimizer": {"type": "sgd", "lr": 1.0}}
    train = RUN["train"] | {"workers": 3, "steps": 120, "eval_every": 10, "run_dir": str(folder / "run")}
    inner = {"batch_size": 2, "optimizer": {"type": "adamw", "lr": 1e-2}}
    config = RUN | {"model": model, "inner": inner, "outer": outer, "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return finish(Program("launch", folder / "run.yaml"))


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder / "run", "eval")}


@pytest.mark.parametrize("engine", ["torch_dist", "torchft"])
def test_a_run_that_one_worker_blew_up_goes_back_and_trains_on(tmp_path: Path, engine: str) -> None:
    code, _, err = launch(tmp_path, engine, at=[47], rollback={"max_loss_factor": 3.0})
    assert code == 0, err
    found, summary = losses(tmp_path), json.loads((tmp_path / "run/summary.json").read_text())
    assert max(found.values()) > EXPLODED_LOSS
    assert found[120] < min(loss for step, loss in found.items() if step <= 40)
    assert summary["num_rollbacks"] == [1, 1, 1]
    assert len(set(summary["anchor_hash"].values())) == 1
    rollbacks = [events(tmp_path / "run", "rollback", worker) for worker in WORKERS]
    assert [[event["number"] for event in of_worker] for of_worker in rollbacks] == [[1], [1], [1]]
    said = (tmp_path / "run/logs/worker-0.log").read_text()
    assert said.count("has exploded (loss ") == 1
    assert len(re.findall(r"all workers go back to the anchors of step \d+ with the next sync", said)) == 1
    if engine == "torch_dist":
        assert len({of_worker[0]["step"] for of_worker in rollbacks}) == 1
        return
    states = [final_state(tmp_path, worker) for worker in WORKERS]
    ledgers = [state["method"]["elastic"]["replicated_state"] for state in states]
    assert ledgers[0] == ledgers[1] == ledgers[2]
    # what was read before the rollback counts as seen, and nothing is read twice
    assert ledgers[0]["samples"] == sum(2 * state["totals"]["steps"] for state in states)


def final_state(folder: Path, worker: int) -> dict[str, Any]:
    newest = max((folder / "run/checkpoints").glob(f"step-*/worker-{worker}"))
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return state


@pytest.mark.parametrize("engine", ["torch_dist", "torchft"])
def test_a_run_that_blows_up_again_and_again_ends_with_one_line(tmp_path: Path, engine: str) -> None:
    options = {"max_loss_factor": 3.0, "max_rollbacks": 2}
    code, _, err = launch(tmp_path, engine, at=list(range(17, 120)), rollback=options)
    assert code == 2
    line = "error: the evaluation has exploded again after 2 rollbacks: lower inner.optimizer.lr"
    assert line in " ".join(err.split())
    assert "Traceback" not in err
    for worker in WORKERS:
        assert [event["number"] for event in events(tmp_path / "run", "rollback", worker)] == [1, 2]
        assert events(tmp_path / "run", "fault", worker)[-1]["reason"].startswith("the evaluation has exploded again")


def test_without_the_key_the_run_stays_blown_up(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, "torch_dist", at=[47], rollback=None)
    assert code == 0, err
    assert losses(tmp_path)[120] > EXPLODED_LOSS
    assert json.loads((tmp_path / "run/summary.json").read_text())["num_rollbacks"] == [0, 0, 0]
