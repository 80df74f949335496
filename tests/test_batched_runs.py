"""A run whose workers are batched in one process ends as one whose workers are processes."""

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from benchmarks import batched, ladder, python_text, repeated_text
from torch import nn

from isthmus.config import RunConfig
from isthmus.data.text import Text
from isthmus.recipes import load_config
from tests.launched import ROOT, finish
from tests.program import Program

CONFIG = {
    "model": {"type": "gpt_neox", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 256},
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 4, "lr_schedule": {"type": "cosine"}},
    "train": {"workers": 3, "steps": 24, "eval_every": 8, "eval_batches": 2, "checkpoint_every": 0},
}


def load_tiny(folder: Path, overrides: list[str]) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"model": CONFIG["model"] | {"sequence_length": 16}}))
    return load_config(path, overrides)


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


AMOUNTS = (8, 2, 2)  # of 12 samples a step


def test_a_worker_with_fewer_samples_has_the_gradient_of_these_alone(tmp_path: Path) -> None:
    config = load_tiny(tmp_path, ["outer.recipe=diloco", "inner.clip_norm=null"])
    workers = batched.Workers(config, batched.Amounts(AMOUNTS, weighted=False))
    alone = [copy.deepcopy(model) for model in workers.models]
    samples = next(batched.Workers(config).open_batches())  # of equal shares: each is read once
    workers.train_step(0, next(workers.open_batches()))
    for model, other, tokens in zip(workers.models, alone, samples["tokens"].split(AMOUNTS), strict=True):
        other.zero_grad()
        other({"tokens": tokens}).backward()
        for param, expected in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)


@pytest.mark.parametrize(("weighted", "weights"), [(True, (8 / 12, 2 / 12, 2 / 12)), (False, (1 / 3, 1 / 3, 1 / 3))])
def test_the_weights_of_amounts_are_those_of_the_mean(
    tmp_path: Path, weighted: bool, weights: tuple[float, ...]
) -> None:
    """With an outer step of length 1 the new weights are the mean of the workers'."""
    plainly = ["outer.optimizer={type: sgd, lr: 1.0}", "outer.schedule={local_steps: 1, warm_start_steps: 0}"]
    config = load_tiny(tmp_path, ["outer.recipe=diloco", *plainly])
    workers = batched.Workers(config, batched.Amounts(AMOUNTS, weighted))
    with closing(batched.OuterLoops(workers)) as outer:
        workers.train_step(config.train.steps // 2, next(workers.open_batches()), outer)
        learnt = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in workers.models]
        outer.step()
    expected = sum(weight * vector for weight, vector in zip(weights, learnt, strict=True))
    for model in workers.models:
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), expected)


def test_shares_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [None, batched.Domains((), dealt=True), batched.Domains((), dealt=False)]
    shares += [batched.Amounts(AMOUNTS, weighted) for weighted in (True, False)]
    monkeypatch.setattr(ladder, "OUTPUT", tmp_path)
    monkeypatch.setattr(batched, "run", lambda config, overrides, shares: batched.RunResult(1.0, {}, 2))
    for each in shares:
        ladder.Run("0.13M", "diloco", "adamw", 0.01, 0, 30, shares=each).result()
    own = ("", "-dealt", "-domains", "-rows-8-2-2-weighted", "-rows-8-2-2")
    assert {path.name for path in (tmp_path / "0.13M").iterdir()} == {
        f"diloco-4-adamw-0.01-H30-seed0{name}.json" for name in own
    }


def test_the_baseline_has_the_rate_with_the_lowest_mean_loss_over_seeds() -> None:
    losses = {0.01: (1.1, 1.0), 0.02: (0.9, 1.3), 0.03: (1.2, 1.2)}  # the best of seed 0 is not the best
    of_ddp = [
        {"method": "ddp", "inside": "adamw", "lr": lr, "H": 0, "seed": seed, "loss": loss}
        for lr, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    assert ladder.best_lr(of_ddp, "adamw") == 0.01
    method = [{**of_ddp[0], "method": "diloco", "H": 30, "seed": seed, "loss": 1.1} for seed in (0, 1)]
    assert ladder.gaps(of_ddp + method) == {("diloco", "adamw", 30): pytest.approx([0.0, 10.0])}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ladder.Run]:
    """What the ladder would run; the lower a learning rate, the lower a loss."""
    ran = list[ladder.Run]()

    def run_all(plan: list[ladder.Run]) -> list[dict[str, Any]]:
        ran.extend(plan)
        return [{"method": r.method, "inside": r.inside, "lr": r.lr, "seed": r.seed, "loss": r.lr} for r in plan]

    monkeypatch.setattr(ladder, "run_all", run_all)
    return ran


def test_a_rung_with_another_batch_searches_the_rates_of_what_it_measures(ran: list[ladder.Run]) -> None:
    climb = ladder.Climb("0.13M", num_steps=20, batch_size=32)
    climb.measure([30], [0, 1], ["muloco"])
    lowest = min(climb.rung.muon)
    searched = [("ddp", lr, seed) for lr in climb.rung.muon for seed in (0, 1)]
    chosen = [(method, lowest, seed) for seed in (0, 1) for method in ("alone", "muloco")]
    assert [(run.method, run.lr, run.seed) for run in ran] == searched + chosen
    assert {run.inside for run in ran} == {"muon"}
    assert all("inner.batch_size=32" in run.more for run in ran)
    assert climb.name == "0.13M-32-sequences-20-steps"


def test_the_length_of_the_rung_is_no_other_length(ran: list[ladder.Run]) -> None:
    climb = ladder.Climb("0.13M", num_steps=ladder.RUNGS["0.13M"].steps)
    climb.measure([30], [0], ["muloco"])
    assert climb.name == "0.13M"
    assert not any(run.more for run in ran)


def test_a_narrower_search_tries_the_given_rates_and_no_others(ran: list[ladder.Run]) -> None:
    climb = ladder.Climb("5M", searched={"muon": (0.003, 0.005)})
    climb.measure([30], [0], ["diloco", "dilocox"])
    tried = {(run.inside, run.lr) for run in ran if run.method == "ddp"}
    assert tried == {("muon", 0.003), ("muon", 0.005), *(("adamw", lr) for lr in climb.rung.adamw)}
    assert [run.lr for run in ran if run.method == "dilocox"] == [0.0035]  # the rung's next, though not tried


def test_a_part_of_the_text_has_the_size_asked_for_and_the_same_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_text, "FOLDER", tmp_path / "text")
    monkeypatch.setattr(ladder, "OUTPUT", tmp_path / "runs")
    monkeypatch.setattr(batched, "run", lambda config, overrides, shares: batched.RunResult(1.0, {}, 2))
    small, large, whole = (repeated_text.make_plan(num_bytes, [0])[0] for num_bytes in (100_000, 200_000, 100_000_000))
    opened = [Text(source=run.more[0].removeprefix("data.source=")).open(64) for run in (small, large, whole)]
    library = Text().open(64)
    assert [len(text.train) for text in opened[:2]] == [pytest.approx(size, rel=0.02) for size in (100_000, 200_000)]
    assert len(opened[2].train) == len(library.train)
    assert all(np.array_equal(text.held_out, library.held_out) for text in opened)
    assert small.result()["sent_bytes"] == 2
    assert len([path for path in (tmp_path / "runs" / repeated_text.RUNG).iterdir() if path.suffix == ".json"]) == 1


def test_a_rung_whose_run_is_long_reads_a_large_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[ladder.Run]
) -> None:
    monkeypatch.chdir(tmp_path)
    climb = ladder.Climb("25M", searched={"muon": (0.005,)})
    climb.measure([30], [0], ["muloco"])
    read = ladder.WORKERS * climb.rung.num_tokens * climb.rung.steps
    config = load_config(ladder.CONFIG, ran[0]._overrides())
    assert len(Text(source=config.data["source"]).open(256).train) > read


def test_names_a_layer_that_cannot_be_stacked() -> None:
    with pytest.raises(TypeError, match="0 is a BatchNorm1d, which cannot be stacked over workers"):
        batched.stack([nn.Sequential(nn.BatchNorm1d(4)) for _ in range(2)])
