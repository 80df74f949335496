"""Workers in turn train a ResNet as workers in processes do, and each may have images of one digit alone."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from benchmarks import batched
from benchmarks.digit_classes import Digits, WorkersInTurn, renew_statistics
from torch import nn

from isthmus.config import RunConfig
from isthmus.recipes import load_config
from tests.launched import ROOT, finish
from tests.program import Program

EXAMPLE = ROOT / "examples/resnet.yaml"
SMALL = ["inner.batch_size=6", "train.workers=3", "train.steps=9", "train.eval_every=0", "outer.schedule.local_steps=4"]


def load_small(*more: str) -> RunConfig:
    return load_config(EXAMPLE, [*SMALL, *more])


def buffers(model: nn.Module) -> torch.Tensor:
    return torch.cat([buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()])


@pytest.mark.processes
def test_ends_as_workers_in_processes_do(tmp_path: Path) -> None:
    overrides = [*SMALL, "outer.recipe=diloco", "outer.schedule.warm_start_steps=0"]
    settings = [word for value in (f"train.run_dir={tmp_path / 'run'}", *overrides) for word in ("--set", value)]
    code, _, error = finish(Program("launch", EXAMPLE, *settings))
    assert code == 0, error
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    workers = WorkersInTurn(load_config(EXAMPLE, overrides))
    result = batched.train(workers)
    assert workers.measure() == pytest.approx(summary["evaluation"], rel=1e-3)
    assert result.loss == workers.evaluate()
    assert result.sent_bytes == summary["sent_bytes"][0]


@pytest.mark.parametrize(("dealt", "expected"), [(False, ["333333", "555555", "888888"]), (True, ["335588"] * 3)])
def test_digits_are_one_a_worker_or_dealt_to_all_alike(dealt: bool, expected: list[str]) -> None:
    workers = WorkersInTurn(load_small("outer.recipe=diloco"), Digits(("3", "5", "8"), dealt))
    labels = next(workers.open_batches())["label"].split(6)
    assert ["".join(str(int(label)) for label in own) for own in labels] == expected
    held_out = [data_set.validation(16, 1000) for data_set in workers.data_sets]
    for digit, batches in zip((3, 5, 8), held_out, strict=True):
        assert {int(label) for batch in batches for label in batch["label"]} == {digit}


def test_statistics_are_a_workers_own_until_a_sync() -> None:
    workers = WorkersInTurn(load_small("outer.recipe=diloco"), Digits(("3", "5", "8"), dealt=False))
    with closing(batched.OuterLoops(workers)) as outer:
        workers.train_step(0, next(workers.open_batches()), outer)
        first, *others = [buffers(model) for model in workers.models]
        assert not any(torch.equal(first, other) for other in others)
        outer.step()
        outer.finish()
        mean = torch.stack([first, *others]).mean(0)
        for model in workers.models:
            torch.testing.assert_close(buffers(model), mean)


def test_new_statistics_are_the_means_over_batches() -> None:
    layer = nn.BatchNorm2d(2)
    batches = [torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) + seed for seed in range(3)]
    renew_statistics(layer, batches)
    torch.testing.assert_close(layer.running_mean, torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([batch.var((0, 2, 3)) for batch in batches]).mean(0))
