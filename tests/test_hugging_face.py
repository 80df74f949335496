"""Hugging Face's Trainer, accelerate and peft with an outer loop: real workers, stopped and resumed, bytes counted."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from isthmus.transport.torchft.lighthouse import lighthouse
from tests import hugging_face_loops, workers

pytestmark = pytest.mark.processes

GUARD_BYTES, VOTE_BYTES = 40, 9  # what a worker sends to one other in every sync besides its pseudo-gradient
WRAPPED = (
    "the model is wrapped in DistributedDataParallel, whose gradients cross to the other workers at every step: leave "
    "it unwrapped; with accelerate, prepare it by accelerator.prepare_model(model, evaluation_mode=True)"
)


@pytest.fixture(scope="module", params=[False, True], ids=["all parameters", "lora"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of the Trainer, and one whose workers are killed after step 8 and resume from step 5."""
    folder, lora = tmp_path_factory.mktemp("trainer"), request.param
    whole = workers.run(hugging_face_loops.train, folder=str(folder / "whole"), lora=lora)
    killed = workers.run(hugging_face_loops.train, folder=str(folder / "killed"), lora=lora, dies=True)
    assert {worker.exit_code for worker in killed} == {-signal.SIGKILL}
    resumed = workers.run(hugging_face_loops.train, folder=str(folder / "killed"), lora=lora, resumes=True)
    return {"whole": workers.results(whole), "resumed": workers.results(resumed), "folder": folder, "lora": lora}


def test_a_resumed_trainer_ends_as_one_that_was_not_stopped(runs: dict[str, Any]) -> None:
    for whole, resumed in zip(runs["whole"], runs["resumed"], strict=True):
        sent = resumed.pop("sent bytes")
        assert whole["sent bytes"][-len(sent) :] == sent
        assert {**resumed, "sent bytes": whole["sent bytes"]} == whole
        assert resumed["inner steps"] == hugging_face_loops.STEPS
        assert list(resumed["saved"]) == ["checkpoint-10", "checkpoint-14", "checkpoint-5"]


def test_workers_of_the_trainer_train_on_their_own_and_end_with_the_same_weights(runs: dict[str, Any]) -> None:
    one, other = runs["whole"]
    assert one["anchors"] == other["anchors"]
    assert one["parameters"] == other["parameters"]
    assert one["losses"] != other["losses"]
    assert one["saved"]["checkpoint-5"] != other["saved"]["checkpoint-5"]


def test_workers_of_the_trainer_average_their_gradients_in_the_start(tmp_path: Path) -> None:
    one, other = workers.results(workers.run(hugging_face_loops.train_averaging_gradients, folder=str(tmp_path)))
    assert one["averaged"]["parameters"] == other["averaged"]["parameters"]  # before any sync of weights
    assert one["averaged"]["norms"][:7] == other["averaged"]["norms"][:7]
    assert all(norm < 1 for norm in one["averaged"]["norms"][:7])  # the mean of gradients of norm 1 is shorter
    assert one["averaged"]["reports"] == [*[("gradients", True)] * 7, *[("all", True)] * 2]
    for name in ("own", "fp16"):
        assert one[name]["parameters"] != other[name]["parameters"]
        assert {fragment for fragment, _ in one[name]["reports"]} == {"all"}


def test_a_recipe_follows_the_optimizer_of_the_trainer(tmp_path: Path) -> None:
    (found,) = workers.results(workers.run(hugging_face_loops.train_with, 1, folder=str(tmp_path)))
    assert found == {"usual": 2, "muon": 8}


def test_a_trainer_that_is_killed_in_an_elastic_world_resumes_where_the_others_are(tmp_path: Path) -> None:
    with lighthouse("127.0.0.1:0", grace_seconds=5, dead_seconds=5) as port:
        ended = workers.run(
            hugging_face_loops.train_elastically, 3, folder=str(tmp_path), lighthouse=f"127.0.0.1:{port}"
        )
    assert [worker.exit_code for worker in ended] == [0, -signal.SIGKILL, 0]
    one, other = workers.results([ended[0], ended[2]])
    assert 1 in one["peers"]  # it went on alone
    assert one["inner steps"] == other["inner steps"] == hugging_face_loops.STEPS
    assert one["anchors"] == other["anchors"] == one["parameters"] == other["parameters"]


def test_of_lora_only_the_adapters_cross() -> None:
    for worker in workers.results(workers.run(hugging_face_loops.adapters_only)):
        assert worker["trainable"] == 2 * (2 * 16 + 2 * 48)  # two layers; rank 2, 16 inputs, 3 x 16 outputs
        assert worker["sent"] == [4 * worker["trainable"] + GUARD_BYTES + VOTE_BYTES] * 2
        assert all("lora_" in name for name in worker["names"])
        assert worker["frozen"][0] == worker["frozen"][1]


def test_accelerate_trains_without_data_parallelism_or_is_told_how() -> None:
    one, other = workers.results(workers.run(hugging_face_loops.accelerated))
    said = {"wrapped": WRAPPED, "unwrapped": WRAPPED, "wrapped later": WRAPPED, "wrapped after the end": "nothing"}
    assert one["said"] == other["said"] == said
    assert one["own"] != other["own"]  # gradients did not cross
    assert not set(one["seen"]) & set(other["seen"])  # accelerate has shared the data out
    num_params = sum(param.numel() for param in hugging_face_loops.tiny_model().parameters())
    assert one["sent"] == [4 * num_params + GUARD_BYTES + VOTE_BYTES] * 2
    assert one["anchors"] == other["anchors"]


@pytest.mark.parametrize("runs", [False], indirect=True, ids=["all parameters"])
def test_what_the_trainer_cannot_do_is_one_line(runs: dict[str, Any], tmp_path: Path) -> None:
    folder = str(shutil.copytree(runs["folder"] / "whole", tmp_path / "run"))
    for rank, worker in enumerate(workers.results(workers.run(hugging_face_loops.refused_trainers, folder=folder))):
        too_late, best, elsewhere, other_weights = worker
        assert too_late == (
            "the Trainer has wrapped the model in DistributedDataParallel: give it the OuterLoopCallback when it is "
            "made, Trainer(..., callbacks=[...]), not by add_callback"
        )
        assert best.startswith("load_best_model_at_end would put one worker's older weights in the place")
        path = f"worker-{rank}/checkpoint-5/outer_loop.pt"
        assert elsewhere.startswith(f"there is no outer state in {folder}/elsewhere/{path}: resume by ")
        assert other_weights.startswith(f"the outer state in {folder}/{path} was saved with other weights than ")
