"""The baseline is data parallelism: the gradient of the mean loss over all workers' batches."""

from pathlib import Path

import pytest
import torch
from worker_processes import events

from isthmus.data import DATA, OrderedBatches
from isthmus.inner import LR_SCHEDULES
from isthmus.models import MODELS
from isthmus.recipes import load_config
from isthmus.spec import build
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.data_parallel import DataParallel
from isthmus.transport.local import Local, LocalWorld


def naive(config):
    """Ten lines of data parallelism: all workers' batches in one process, one gradient."""
    spec = build(MODELS, config.model)
    model, data_set = spec.build(config.train.seed), build(DATA, config.data).open(spec.sequence_length)
    streams = [
        OrderedBatches(data_set.sample_order(config.train.seed), config.inner.batch_size, worker, 2)
        for worker in range(2)
    ]
    kind = {key: config.inner.optimizer[key] for key in ("lr", "betas", "eps")}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_in" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_in" in n]
    decay = config.inner.optimizer["weight_decay"]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **kind)
    factor = build(LR_SCHEDULES, config.inner.lr_schedule).over(config.train.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(config.train.steps):
        optimizer.zero_grad()
        sum(model(next(stream)) / 2 for stream in streams).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip_norm)
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.processes
def test_ddp_is_ten_lines_of_data_parallelism(two_workers: Path):
    config = load_config(two_workers / "ddp/config.yaml")
    saved = Checkpoints(two_workers / "ddp/checkpoints", 0, {}).load(30)["model"]
    for name, param in naive(config).named_parameters():
        if name.endswith("query_key_value.bias"):
            continue  # softmax does not see the keys' bias: its gradient is rounding noise, which AdamW makes large
        torch.testing.assert_close(saved[name], param.detach(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.processes
def test_ddp_evaluates_the_model(two_workers: Path):
    assert {event["of"] for event in events(two_workers / "ddp", 0, "eval")} == {"model"}


def test_alone_there_is_nothing_to_wrap_or_send():
    model = torch.nn.Linear(2, 2)
    method = DataParallel(model, Local(LocalWorld(1), 0), sync_budget_seconds=1)
    assert method.wrap(model) is model
    assert method.step() == []


def test_seconds_are_hidden_until_the_last_bucket_is_full():
    method = DataParallel(torch.nn.Linear(2, 2), Local(LocalWorld(1), 0), sync_budget_seconds=1)
    method._spans = [
        (1.0, 3.0, False),
        (2.0, 4.0, False),
        (6.0, 6.5, True),
    ]  # two overlap; the third begins when backward ends
    (report,) = method.step()
    assert report.seconds == pytest.approx(3.5)  # the union
    assert report.hidden_seconds == pytest.approx(3.0)
    assert method.step() == []
