"""Two real workers, on one GPU where there is one, end with the bits that torch alone gives, on the CPU even."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.workers import results, run
from torch import nn

from isthmus import attach

pytestmark = [pytest.mark.processes, pytest.mark.gpu]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, BLOCKS, WIDTH = 13, 4, 64
OWN_ROUNDING = ("sparseloco",)  # what decays in a residual is a worker's own: torch fuses it as the device likes


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))


def train(rank: int, recipe: str, device: str, native: str, offload: str | None) -> list[Any]:
    """Parameters and the hash of the anchors after some syncs; inner steps are sums, alike on every device."""
    os.environ["ISTHMUS_NATIVE"] = native
    torch.manual_seed(0)
    model = Blocks().to(device)
    generator = torch.Generator().manual_seed(1 + rank)
    transport = {"type": "torch_dist", "sync_budget_seconds": 20.0}
    more: dict[str, Any] = {} if offload is None else {"offload": offload}
    loop = attach(recipe, model, steps=STEPS, local_steps=4, transport=transport, **more)
    for _ in range(STEPS):
        with torch.no_grad():
            for param in model.parameters():
                param.add_((0.01 * torch.randn(param.shape, generator=generator)).to(device))
        loop.step()
    loop.finish()
    loop.close()
    assert next(model.parameters()).device.type == device
    return [loop.anchor_hash(), [param.detach().cpu().flatten().tolist() for param in model.parameters()]]


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("recipe", ["diloco", "streaming", "muloco", "sparseloco"])
def test_kernels_streams_and_offload_change_no_bit(recipe, offload):
    found = results(run(train, 2, recipe=recipe, device=DEVICE, native="1", offload=offload))
    where = DEVICE if recipe in OWN_ROUNDING else "cpu"
    expected = results(run(train, 2, recipe=recipe, device=where, native="0", offload=None))
    assert found[0][0] == found[1][0]
    assert found == expected
