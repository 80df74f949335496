"""Whole runs on speech: they resume bit for bit, masks included."""

import math

import pytest
from toy_runs import assert_resumes_alike
from worker_processes import Job, run_jobs, said, summary

from isthmus.recipes import load_config
from isthmus.train.process import find_process
from isthmus.train.trackers import Trackers
from isthmus.train.trainer import Trainer

pytestmark = pytest.mark.processes

SIZES = (
    "hidden_size: 16, num_layers: 2, num_heads: 2, conv_size: 8, "
    "position_kernel: 4, position_groups: 4, num_samples: 8000"
)
MODELS = {
    "wav2vec2": f"model={{type: wav2vec2, {SIZES}, mask_length: 3, gumbel_temperatures: [2, 0.5, 0.9]}}",
    "wav2vec2_ctc": f"model={{type: wav2vec2_ctc, {SIZES}, mask_length: 3, dropout: 0.1}}",
}
RECIPES = {
    "wav2vec2": ["outer.recipe=streaming", "outer.schedule={local_steps: 4, num_fragments: 2, overlap_steps: 1}"],
    "wav2vec2_ctc": ["outer.recipe=sparseloco", "outer.schedule={local_steps: 3}"],
}
EVERY_3_STEPS = [
    "outer.recipe=diloco",
    "outer.schedule={local_steps: 3, num_fragments: 1, overlap_steps: 0, warm_start_steps: 0}",
]


def configure(folder, name, *overrides):
    base = [
        MODELS[name],
        "data={type: speech, source: formants}",
        "inner.batch_size=2",
        "train={steps: 9, log_every: 1, eval_every: 4, eval_batches: 2, checkpoint_every: 1, keep_checkpoints: 99}",
        f"train.run_dir={folder / 'run'}",
    ]
    return load_config(None, [*base, *RECIPES[name], *overrides])


@pytest.mark.parametrize("name", MODELS)
def test_resumed_after_any_step_nothing_differs(tmp_path, name):
    assert_resumes_alike(configure(tmp_path, name), (7, 4, 2))


def test_the_temperature_follows_the_rounds(tmp_path):
    config = configure(tmp_path, "wav2vec2", *EVERY_3_STEPS)
    trainer = Trainer(config, find_process(config), Trackers())
    part = trainer.run()
    assert set(part["evaluation"]) == {"loss", "contrastive_accuracy", "codevector_perplexity"}
    assert trainer.model.temperature.item() == pytest.approx(2 * 0.9**9)


def test_a_worker_of_two_ranks_learns_and_measures(tmp_path):
    """FSDP2 gathers for what a model measures, and each rank listens to its half of the validation data."""
    jobs = [
        Job(
            [
                MODELS[name],
                "data={type: speech, source: formants}",
                "outer.recipe=diloco",
                "mesh.shard=2",
                "train.steps=2",
                "train.checkpoint_every=0",
                f"train.run_dir={tmp_path / name}",
            ],
            workers_said=1,
        )
        for name in MODELS
    ]
    assert run_jobs(jobs, 2) == [0, 0], said(tmp_path / "wav2vec2", 0)
    values = [summary(tmp_path / name)["evaluation"] for name in MODELS]
    assert [set(each) for each in values] == [
        {"loss", "contrastive_accuracy", "codevector_perplexity"},
        {"loss", "word_error_rate", "character_error_rate"},
    ]
    assert all(math.isfinite(value) for each in values for value in each.values())
