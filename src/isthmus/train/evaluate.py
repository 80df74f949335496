"""The loss on a fixed validation set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    device: torch.device | str = "cpu",
    forward: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None,
) -> float:
    """Mean loss over all samples of `batches`, in evaluation mode; the model is left as it was.

    Args:
        model: maps a batch to the mean of its losses.
        batches: samples along the first dimension.
        device: where the model is.
        forward: what maps a batch to the mean of its losses where the model is only a part of that.
    """
    forward = forward or model
    was_training = model.training
    model.eval()
    total, num_samples = 0.0, 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        total += size * forward({name: tensor.to(device) for name, tensor in batch.items()}).item()
        num_samples += size
    model.train(was_training)
    return total / num_samples
