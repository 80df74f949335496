"""What a launcher can see of a run that is to be resumed, without a worker."""

import shutil

import pytest
from toy_runs import toy_config
from worker_processes import Job, events, final_weights, run_jobs, said

from isthmus.core import UserError
from isthmus.train.resume_check import AlreadyFinished, check_resume, check_unfinished
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


@pytest.mark.parametrize("elastic", [(), (ELASTIC,)])
def test_a_run_that_may_begin_does_only_where_there_is_no_checkpoint_at_all(configured, run, elastic):
    with pytest.raises(AlreadyFinished):
        check_resume(configured(), may_begin=True)
    if not elastic:
        with pytest.raises(UserError, match="holds no usable checkpoint that all workers have"):
            check_resume(configured("train.workers=2"), may_begin=True)
    shutil.rmtree(run / "checkpoints")
    check_resume(configured("train.workers=2", *elastic), may_begin=True)


def test_a_worker_sees_alone_that_it_is_finished(configured, run):
    with pytest.raises(AlreadyFinished, match="is finished after 12 steps"):
        check_unfinished(configured(), 0)
    check_unfinished(configured("train.steps=13"), 0)
    check_unfinished(configured(), 1)
    (run / "checkpoints/step-00000012/worker-0/state.safetensors").write_bytes(b"")
    check_unfinished(configured(), 0)


def test_auto_begins_goes_on_and_is_finished(finished, configured, run, logged):
    weights = final_weights(run, 0)
    shutil.rmtree(run / "checkpoints")  # killed before the first one: metrics are there
    assert train(configured(), resume="auto")["finished"]
    assert not logged.messages[0].startswith("checkpoint refused")
    steps = [event["step"] for event in events(run, 0, "step")]
    assert steps == sorted(set(steps))
    assert final_weights(run, 0) == weights
    shutil.rmtree(run / "checkpoints/step-00000012")
    assert train(configured(), resume="auto")["finished"]
    assert [event["step"] for event in events(run, 0, "step")] == steps
    assert final_weights(run, 0) == weights
    with pytest.raises(AlreadyFinished):
        train(configured(), resume="auto")


def test_auto_does_not_begin_over_a_checkpoint_that_is_damaged(configured, run):
    for path in run.glob("checkpoints/*/worker-0/state.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="holds no usable checkpoint that all workers have"):
        train(configured(), resume="auto")


@pytest.mark.processes
def test_auto_does_not_begin_where_only_some_workers_have_lost_their_checkpoints(tmp_path):
    def run(steps: int) -> list[int]:
        overrides = [f"train.run_dir={tmp_path}/{{rank}}", f"train.steps={steps}", "outer.recipe=diloco"]
        return run_jobs([Job(overrides, resume="auto")], 2)

    assert run(8) == [0, 0]  # both begin
    shutil.rmtree(tmp_path / "1/checkpoints")
    assert run(12) == [2, 2]
    assert "1/checkpoints holds no usable checkpoint that all workers have" in said(tmp_path / "1", 1)
    shutil.rmtree(tmp_path / "0/checkpoints")
    assert run(12) == [0, 0]
    assert [event["step"] for event in events(tmp_path / "0", 0, "step")] == list(range(1, 13))
