"""One worker of two real ranks, under DDP and FSDP2, against one process with the batches of both."""

import math

import pytest
import torch
import torch.distributed as dist
from tests.parallel.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from isthmus.inner import AdamW, SupervisedStep

pytestmark = pytest.mark.processes

POISONED = 2  # at this step the loss of rank 1 is nan


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 6), nn.Linear(6, 1)])

    def forward(self, batch):
        hidden = self.blocks[0](batch["x"]).tanh()
        return (self.blocks[1](hidden).squeeze(1) - batch["y"]).square().mean()


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * rank + step))
    return {"x": x, "y": x.sum(1).sin()}


def poison(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "y": batch["y"] * math.nan}


def step_of(model: nn.Module, wrapped: nn.Module) -> SupervisedStep:
    return SupervisedStep(wrapped, AdamW().build(model), micro_batch_size=2, clip_norm=0.05)


def full(param: nn.Parameter) -> torch.Tensor:
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def work(kind: str) -> tuple[torch.Tensor, list[dict[str, float]]]:
    rank, model = dist.get_rank(), Blocks()
    wrapped = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    step = step_of(model, wrapped)
    metrics = []
    for i in range(5):
        batch = batch_of(rank, i)
        metrics.append(step(poison(batch) if (i, rank) == (POISONED, 1) else batch))
    return torch.cat([full(param).reshape(-1) for param in model.parameters()]), metrics


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_train_clip_and_skip_as_one(kind: str):
    """A loss that is not finite on one rank makes both skip: the other must not step alone."""
    model = Blocks()
    step = step_of(model, model)
    expected = []
    for i in range(5):
        both = {name: torch.cat([batch_of(rank, i)[name] for rank in (0, 1)]) for name in ("x", "y")}
        expected.append(step(poison(both) if i == POISONED else both))

    for weights, metrics in run_ranks(work, 2, kind):
        assert [m["skipped"] for m in metrics] == [0, 0, 1, 0, 0] == [m["skipped"] for m in expected]
        norms = [[m["grad_norm"] for m in some if not m["skipped"]] for some in (metrics, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert min(norms[1]) > 0.05
        torch.testing.assert_close(weights, torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
