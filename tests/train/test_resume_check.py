"""What a launcher can see of a run that is to be resumed, without a worker."""

import shutil

import pytest
from toy_runs import toy_config

from isthmus.core import UserError
from isthmus.train.resume_check import check_resume
from isthmus.train.worker import train

ELASTIC = "outer.transport={type: torchft}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(toy_config(folder))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """The folder of a finished run of 12 steps, with checkpoints of steps 0, 5, 10 and 12."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def configured(finished, run):
    """Makes the configuration of the run, as it was but for some values."""
    base = (f"data.source={finished}/text.txt", f"train.run_dir={run}")
    return lambda *overrides: toy_config(finished, *base, *overrides)


def test_a_run_that_is_finished_goes_on_for_more_steps_only(configured):
    with pytest.raises(UserError, match="is finished after 12 steps: raise train.steps to train on"):
        check_resume(configured())
    check_resume(configured("train.steps=13"))


def test_a_damaged_end_is_no_end(configured, run):
    (run / "checkpoints/step-00000012/worker-0/state.safetensors").write_bytes(b"")
    check_resume(configured())


def test_a_damaged_manifest_is_left_to_the_workers(configured, run):
    (run / "checkpoints/step-00000012/worker-0/manifest.json").write_text("{}")
    check_resume(configured())
    with pytest.raises(UserError, match="step-00000010/worker-0 belongs to another run: model.sequence_length is 8"):
        check_resume(configured("model.sequence_length=4"))


def test_every_worker_has_to_have_it_where_none_comes_late(configured, run):
    with pytest.raises(UserError, match="holds no usable checkpoint that all workers have: begin a new run"):
        check_resume(configured("train.workers=2"))
    with pytest.raises(UserError, match="step-00000012/worker-0 belongs to another run"):
        check_resume(configured("train.workers=2", ELASTIC))
    shutil.rmtree(run / "checkpoints")
    check_resume(configured(ELASTIC))
