"""One worker in this process: it trains, stops, and goes on as if it never had stopped."""

import json
import shutil
import signal

import pytest
import torch
from toy_runs import assert_resumes_alike, toy_config
from worker_processes import events, final_weights, summary

from isthmus.core import UserError
from isthmus.inner import Cosine
from isthmus.train.assemble import config_hash
from isthmus.train.trainer import Trainer
from isthmus.train.worker import train

KEEP_ALL = ("train.checkpoint_every=1", "train.keep_checkpoints=99")
METHODS = {
    "diloco": (),
    "ddp": ("outer.recipe=ddp",),
    "streaming": ("outer.recipe=streaming", "outer.schedule.overlap_steps=1"),
    "eager": ("outer.recipe=eager", "outer.schedule.overlap_steps=4"),
    "dilocox": ("outer.recipe=dilocox", "outer.compressor.compressor.rank=2", "outer.schedule.overlap_steps=4"),
    "keep progress": ("outer.schedule.overlap_steps=3", "outer.merge.type=keep_progress"),
    "sparseloco": ("outer.recipe=sparseloco", "outer.compressor.compressor.keep=64"),
    "shared momentum": (
        "outer.compressor={type: shared_momentum, compressor: {type: quantize, rounding: stochastic}}",
        "outer.schedule={warm_start_steps: 3, warm_start_every: 1}",
    ),
    "muloco": ("outer.recipe=muloco",),
}


def at_step(monkeypatch, number, action):
    """Do something before step `number`."""
    train_step = Trainer._train_step

    def wrapped(trainer):
        if trainer.totals.steps + 1 == number:
            action(trainer)
        train_step(trainer)

    monkeypatch.setattr(Trainer, "_train_step", wrapped)


def test_what_a_run_leaves_behind(tmp_path):
    config = toy_config(tmp_path)
    part = train(config)
    run_dir = tmp_path / "run"
    assert part == json.loads((run_dir / "worker-0.json").read_text())
    assert summary(run_dir)["anchor_hash"] == {"worker-0": part["anchor_hash"]}
    losses = [event["loss"] for event in events(run_dir, 0, "eval")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == summary(run_dir)["eval_loss"] < losses[0]
    assert summary(run_dir)["tokens_per_worker"] == 12 * 4 * 8
    assert [event["step"] for event in events(run_dir, 0, "step")] == list(range(1, 13))
    assert [event["step"] for event in events(run_dir, 0, "sync")] == [4, 8, 12]
    assert [event["step"] for event in events(run_dir, 0, "eval")] == [5, 10, 12]
    assert {event["of"] for event in events(run_dir, 0, "eval")} == {"anchor"}
    assert [int(path.name[5:]) for path in sorted((run_dir / "checkpoints").iterdir())] == [0, 5, 10, 12]


def test_the_learning_rate_follows_the_whole_run(tmp_path):
    train(toy_config(tmp_path, "inner.lr_schedule={type: cosine, warmup_fraction: 0.25, final_fraction: 0}"))
    rates = [event["lr"] for event in events(tmp_path / "run", 0, "step")]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize("name", METHODS)
def test_identity_37_resumed_after_any_step_nothing_differs(tmp_path, name):
    """Every checkpoint of a run, syncs in flight included, leads to the same lines and the same last bit."""
    assert_resumes_alike(toy_config(tmp_path, *METHODS[name], *KEEP_ALL), range(11, -1, -1))


def test_the_search_for_a_micro_batch_changes_nothing_else(tmp_path, logged):
    run_dir = tmp_path / "run"
    chosen = train(toy_config(tmp_path, "inner.micro_batch_size=auto"))["micro_batch_size"]
    assert chosen in (1, 2, 4)
    assert f"micro-batches of {chosen} are the fastest here" in logged.messages
    found, weights = events(run_dir, 0), final_weights(run_dir, 0)
    shutil.rmtree(run_dir)
    train(toy_config(tmp_path, f"inner.micro_batch_size={chosen}"))
    assert events(run_dir, 0) == found
    assert final_weights(run_dir, 0) == weights


def test_every_worker_may_have_its_own_micro_batch_and_may_compile(tmp_path):
    own = [*(f"inner.micro_batch_size={size}" for size in ("auto", 1, 4, "null")), "inner.compile=true"]
    hashes = {config_hash(toy_config(tmp_path, setting)) for setting in own}
    assert len(hashes) == 1


def test_a_signal_stops_it_and_it_goes_on_as_if_it_had_not(tmp_path, monkeypatch, logged):
    config, run_dir = toy_config(tmp_path, "train.steps=100", "train.eval_every=50"), tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda trainer: signal.raise_signal(signal.SIGINT))
        part = train(config)
    assert not part["finished"]
    assert 7 <= part["steps"] < 100
    how = f"isthmus train {run_dir}/config.yaml --resume"
    assert f"stopped after step {part['steps']}; go on with: {how}" in logged.messages
    assert not summary(run_dir)["finished"]
    train(config, resume=True)
    interrupted, weights = events(run_dir, 0), final_weights(run_dir, 0)
    shutil.rmtree(run_dir)
    train(config)
    assert events(run_dir, 0) == interrupted
    assert final_weights(run_dir, 0) == weights


def test_lines_after_the_checkpoint_are_cut_off(tmp_path, monkeypatch):
    config, run_dir = toy_config(tmp_path), tmp_path / "run"

    def crash(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_step(patch, 9, crash)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert [event["step"] for event in events(run_dir, 0, "step")] == list(range(1, 9))
    train(config, resume=True)  # from step 5
    assert [event["step"] for event in events(run_dir, 0, "step")] == list(range(1, 13))


def test_a_gradient_that_is_not_finite_is_a_fault_and_the_step_counts(tmp_path, monkeypatch):
    def spoil(trainer):
        trainer.model.register_forward_hook(lambda module, args, loss: loss * torch.nan if spoiled.pop() else None)

    spoiled = [False] * 99 + [True]
    at_step(monkeypatch, 3, spoil)
    part = train(toy_config(tmp_path))
    assert part["skipped_steps"] == 1
    assert part["steps"] == 12
    assert events(tmp_path / "run", 0, "fault") == [
        {"event": "fault", "step": 3, "reason": "the gradient is not finite: step skipped"}
    ]


def refused(config, resume=False):
    with pytest.raises(UserError) as caught:
        train(config, resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    config = toy_config(tmp_path)
    train(config)
    assert "holds a run already: go on with it by --resume" in refused(config)


def test_a_finished_run_goes_on_only_for_more_steps(tmp_path):
    train(toy_config(tmp_path))
    assert "is finished after 12 steps: raise train.steps" in refused(toy_config(tmp_path), resume=True)
    assert train(toy_config(tmp_path, "train.steps=20"), resume=True)["steps"] == 20
    steps = events(tmp_path / "run", 0, "step")
    assert [event["step"] for event in steps] == list(range(1, 21))
    factor = Cosine().over(20)
    assert [event["lr"] for event in steps[12:]] == pytest.approx([1e-2 * factor(step) for step in range(12, 20)])


def test_nothing_to_resume_from_is_one_line(tmp_path):
    assert "holds no usable checkpoint" in refused(toy_config(tmp_path), resume=True)


def test_damaged_checkpoints_only_are_one_line(tmp_path, logged):
    config = toy_config(tmp_path)
    train(config)
    for path in tmp_path.glob("run/checkpoints/*/*/state.json"):
        path.write_text("{}")
    assert "holds no usable checkpoint" in refused(config, resume=True)
    assert sum(line.startswith("checkpoint refused: ") for line in logged.messages) == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.arguments.width=6", "model.arguments.width is None there and 6 here"),
        ("outer.recipe=streaming", "outer.recipe is diloco there and streaming here"),
        ("inner.batch_size=2", "inner.batch_size is 4 there and 2 here"),
        ("inner.optimizer.type=muon", "inner.optimizer.type is adamw there and muon here"),
        ("outer.schedule.local_steps=6", "outer.schedule.local_steps is 4 there and 6 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(tmp_path, override, message):
    train(toy_config(tmp_path))
    assert message in refused(toy_config(tmp_path, override), resume=True)


def test_what_may_change_between_stop_and_resume(tmp_path):
    train(toy_config(tmp_path))
    changed = ("train.steps=14", "train.log_every=2", "train.keep_checkpoints=1", "inner.optimizer.lr=1e-3")
    assert train(toy_config(tmp_path, *changed), resume=True)["finished"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source=/nowhere", "data: '/nowhere' does not exist"),
        ("data.source={folder}/empty", "holds no text"),
        ("model.sequence_length=4000", "a sequence of 4000 tokens needs 4001"),
        ("train.workers=3", "the configuration says 3 workers, but 1 rank started"),
    ],
)
def test_bad_input_is_one_line(tmp_path, override, message):
    (tmp_path / "empty").mkdir()
    assert message in refused(toy_config(tmp_path, override.format(folder=tmp_path)))


def test_data_with_more_tokens_than_the_model_knows(tmp_path):
    config = toy_config(tmp_path, "model={type: gpt_neox, vocab_size: 200, sequence_length: 8}")
    assert "model.vocab_size is 200, the data has 256: raise it" in refused(config)


def test_details_are_logged_where_they_are_asked_for(tmp_path, caplog):
    caplog.set_level("DEBUG", "isthmus.train")
    train(toy_config(tmp_path))
    assert "the checkpoint of step 5 is written" in caplog.messages
    assert sum("finished a sync: SyncReport(outer_step=" in line for line in caplog.messages) == 3
