"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1) in plain loops: no threads, no transport, no fragments.

Read this first: every worker takes H local steps with its own optimizer; then the anchor (the parameters that all
workers agree on) takes one step of Nesterov's momentum along the mean of their pseudo-gradients (anchor - parameters),
and all workers go on from it. `isthmus.outer.OuterLoop` does the same over a network, which test_reference.py checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Train = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]  # model, optimizer, worker, step: one local step


def diloco(
    models: list[nn.Module],
    make_inner_optimizer: Callable[[Any], torch.optim.Optimizer],
    train: Train,
    local_steps: int,
    outer_steps: int,
    lr: float,
    momentum: float,
) -> list[torch.Tensor]:
    """Train equal models, one a worker, in place; returns the anchor."""
    anchor = [param.detach().clone() for param in models[0].parameters()]
    velocity = [torch.zeros_like(value) for value in anchor]
    inner_optimizers = [make_inner_optimizer(model.parameters()) for model in models]
    for outer_step in range(outer_steps):
        for worker, (model, inner_optimizer) in enumerate(zip(models, inner_optimizers, strict=True)):
            for step in range(local_steps):
                train(model, inner_optimizer, worker, outer_step * local_steps + step)
        for value, speed, *params in zip(anchor, velocity, *(model.parameters() for model in models), strict=True):
            outer_gradient = sum(value - param.detach() for param in params) / len(models)
            speed.mul_(momentum).add_(outer_gradient)
            value -= lr * (outer_gradient + momentum * speed)
        for model in models:
            for param, value in zip(model.parameters(), anchor, strict=True):
                param.data.copy_(value)
    return anchor
