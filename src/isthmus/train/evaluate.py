"""Evaluation of a model on a fixed validation set."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.inner.step import Batch
from isthmus.models import CausalLM
from isthmus.parallel import mean_over_shards, reshard

_LARGEST = 700.0  # whose exponential is a float
_SEED = 0  # of whatever an evaluation draws (masks, latents): the same every time


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: list[Batch],
    device: torch.device | str = "cpu",
    forward: Callable[[Batch], torch.Tensor] | None = None,
    mesh: DeviceMesh | None = None,
) -> dict[str, float]:
    """Return the mean loss over all samples, and what else the model measures; the model is left as it was.

    It maps a batch, samples along the first dimension, to the mean of its losses; where it is only a part of what does
    that, `forward` is the whole. With a mesh, the ranks of a worker make the call together, each with its rows.
    """
    was_training = model.training
    model.eval()
    devices = [device] if torch.device(device).type == "cuda" else []
    eagerly = torch.compiler.set_stance("force_eager")  # a compiled model has been compiled for training alone
    with eagerly, torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        there = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        sums = {"loss": _sum_of_losses(forward or model, there)}
        if hasattr(model, "measure"):
            sums |= model.measure(there)  # type: ignore[operator]
    model.train(was_training)
    reshard(model)
    if mesh is not None:
        means = mean_over_shards(torch.tensor(list(sums.values()), dtype=torch.float64), mesh)
        sums = dict(zip(sums, means.tolist(), strict=True))
    values = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    if isinstance(model, CausalLM):
        values["perplexity"] = math.exp(values["loss"]) if values["loss"] < _LARGEST else math.inf
    return values


def _sum_of_losses(forward: Callable[[Batch], torch.Tensor], batches: list[Batch]) -> tuple[float, float]:
    """Return the sum of all samples' losses, and how many samples there are."""
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    return sum(size * forward(batch).item() for size, batch in zip(sizes, batches, strict=True)), sum(sizes)
