"""A run whose workers are batched in one process ends as one whose workers are processes."""

import json
from pathlib import Path

import pytest
import yaml
from benchmarks import batched
from torch import nn

from isthmus.recipes import load_config
from tests.launched import ROOT, finish
from tests.program import Program

CONFIG = {
    "model": {"type": "gpt_neox", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 256},
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 4, "lr_schedule": {"type": "cosine"}},
    "train": {"workers": 3, "steps": 24, "eval_every": 8, "eval_batches": 2, "checkpoint_every": 0},
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recipe", "inside"), [("diloco", "adamw"), ("muloco", "muon"), ("eager", "muon"), ("ddp", "adamw")]
)
def test_ends_as_workers_in_processes_do(tmp_path: Path, recipe: str, inside: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"model": CONFIG["model"] | {"sequence_length": 16}}))
    overrides = [f"outer.recipe={recipe}", f"inner.optimizer={{type: {inside}, lr: 0.01}}"]
    if recipe != "ddp":  # sums are taken in another order, and a codec would round some of them the other way
        overrides += ["outer.schedule.local_steps=5", "outer.compressor={type: cast}"]
    settings = [word for value in (f"train.run_dir={tmp_path / 'run'}", *overrides) for word in ("--set", value)]
    code, _, error = finish(Program("launch", path, *settings))
    assert code == 0, error
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    result = batched.run(path, overrides)
    assert result.loss == pytest.approx(summary["eval_loss"], rel=1e-4)
    if recipe != "ddp":
        assert result.sent_bytes == summary["sent_bytes"][0]
        assert [*result.losses] == [8, 16]


def test_domains_are_one_a_worker_or_dealt_to_all_alike(tmp_path: Path) -> None:
    """The same samples in a step; dealt, each worker has as many of every domain."""
    for letter in "abc":
        (tmp_path / letter).mkdir()
        (tmp_path / letter / "1.txt").write_text(9000 * letter)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"inner": {"batch_size": 6}}))
    config, sources = load_config(path, ["outer.recipe=diloco"]), tuple(str(tmp_path / letter) for letter in "abc")

    def letters(dealt: bool) -> list[str]:
        rows = next(batched.Workers(config, batched.Domains(sources, dealt)).open_batches())
        return ["".join(chr(int(row[0])) for row in worker) for worker in next(iter(rows.values())).split(6)]

    assert letters(dealt=False) == ["aaaaaa", "bbbbbb", "cccccc"]
    assert letters(dealt=True) == ["aabbcc"] * 3


def test_names_a_layer_that_cannot_be_stacked() -> None:
    with pytest.raises(TypeError, match="0 is a BatchNorm1d, which cannot be stacked over workers"):
        batched.stack([nn.Sequential(nn.BatchNorm1d(4)) for _ in range(2)])
