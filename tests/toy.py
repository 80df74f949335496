"""A model of a few numbers trained by threads: small enough to compute by hand what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from isthmus.compress import Cast
from isthmus.core import SyncReport, SyncSchedule, split_whole
from isthmus.outer import OuterLoop
from isthmus.transport.local import LocalWorld, run_workers

sgd = partial(torch.optim.SGD, lr=0.1)
averaging = partial(torch.optim.SGD, lr=1.0)
nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def toy_model(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(seed)  # not torch's global one: workers are threads here
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=generator)
    return model


def toy_batch(worker: int, step: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(size, 3, generator=generator)
    return inputs, inputs[:, :2].sin() + 0.1 * torch.randn(size, 2, generator=generator)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Lazy(Cast):
    """From its second message on it pretends to send a quarter of its largest."""

    def message_fraction(self, state):
        return 0.25 if state["messages"] > 1 else 1.0

    def average(self, local, state, peers, with_residual=True):
        state["messages"] = state.get("messages", 0) + 1
        return super().average(local, state, peers, with_residual)


@dataclass
class Worker:
    """One worker after (or during) its run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loop: OuterLoop
    reports: list[SyncReport] = field(default_factory=list)

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])

    @property
    def anchor(self) -> torch.Tensor:
        """All anchors in the order of the model's parameters (fragments cut by `split_whole` or in model order)."""
        return torch.cat([a.detach().reshape(-1) for f in self.loop.state.fragments for a in f.anchor])


def toy_run(
    num_workers: int = 2,
    steps: int = 12,
    inner: Callable[..., torch.optim.Optimizer] = sgd,
    batch: Callable[[int, int], Any] = toy_batch,
    world: LocalWorld | None = None,
    each_step: Callable[[int, int, Worker], None] = lambda rank, step, worker: None,
    split: Callable[[nn.Module], list[Any]] = split_whole,
    finish: bool = False,
    make_model: Callable[[], nn.Module] = toy_model,
    **method: Any,
) -> list[Worker]:
    """Train `num_workers` toy models; `method` holds the OuterLoop's arguments. Returns the workers in rank order."""
    method = {"schedule": SyncSchedule(3), "compressor": Cast(), "outer_optimizer": nesterov, **method}

    def work(rank: int, transport: Any) -> Worker:
        model = make_model()
        worker = Worker(model, inner(model.parameters()), OuterLoop(split(model), transport=transport, **method))
        for step in range(steps):
            inner_step(model, worker.optimizer, batch(rank, step))
            worker.reports += worker.loop.step()
            each_step(rank, step + 1, worker)
        if finish:
            worker.reports += worker.loop.finish()
        return worker

    return run_workers(world or LocalWorld(num_workers), work)
