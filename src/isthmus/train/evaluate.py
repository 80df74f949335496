"""What a model is worth on a fixed validation set."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from isthmus.inner.step import Batch
from isthmus.models import CausalLM

_LARGEST = 700.0  # whose exponential is a float
_SEED = 0  # of whatever an evaluation draws (masks, latents): the same every time


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: list[Batch],
    device: torch.device | str = "cpu",
    forward: Callable[[Batch], torch.Tensor] | None = None,
) -> dict[str, float]:
    """Loss (mean over all samples of `batches`), and what else the model measures; the model is left as it was.

    Args:
        model: maps a batch to the mean of its losses.
        batches: samples along the first dimension.
        device: where the model is.
        forward: what maps a batch to the mean of its losses where the model is only a part of that.
    """
    was_training = model.training
    model.eval()
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        there = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        values = {"loss": _mean_loss(forward or model, there)}
        if isinstance(model, CausalLM):
            values["perplexity"] = math.exp(values["loss"]) if values["loss"] < _LARGEST else math.inf
        if hasattr(model, "measure"):
            values |= model.measure(there)
    model.train(was_training)
    return values


def _mean_loss(forward: Callable[[Batch], torch.Tensor], batches: list[Batch]) -> float:
    total, num_samples = 0.0, 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        total += size * forward(batch).item()
        num_samples += size
    return total / num_samples
