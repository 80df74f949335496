"""Golden traces: two workers, a model of 40 numbers, the anchors of every recipe after each sync.

After a change that is meant to alter a method: pytest tests/recipes/test_golden.py --regenerate-golden; read the diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.recipes import RECIPES, Plan
from isthmus.transport.local import LocalWorld, run_workers

GOLDEN = Path(__file__).parent / "golden"
STEPS, LOCAL_STEPS = 12, 4
METHODS = [
    name + variant for name in RECIPES.names() if name != "ddp" for variant in ("", "_paper")
]  # ddp has no anchors; see test_data_parallel


class TwoBlocks(nn.Module):
    """A 4 x 4 matrix and 4 biases, twice; starting values a staircase."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) / 8)


def move(model: nn.Module, rank: int, step: int) -> None:
    """A made-up inner step whose values are exact in binary: no library, no rounding decides them."""
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            ramp = torch.arange(param.numel()).view(param.shape)
            param.sub_((ramp * (3 + 2 * rank) + step * (index + 1)).remainder(16).sub(6) / 256)


def trace(name: str) -> list[dict[str, Any]]:
    """Anchors of both workers after every step that finished a sync."""

    def work(rank: int, transport: Any) -> list[Any]:
        model = TwoBlocks()
        recipe = RECIPES.get(name)(Plan(num_workers=2, steps=STEPS, local_steps=LOCAL_STEPS))
        loop = recipe.outer_loop(model, transport)
        seen = []
        for step in range(1, STEPS + 1):
            move(model, rank, step)
            if reports := loop.step():
                anchor = torch.cat([a.detach().reshape(-1) for f in loop.state.fragments for a in f.anchor])
                sent = sum(report.sent_bytes for report in reports)
                seen.append({"step": step, "sent_bytes": sent, "anchor": [round(v, 7) for v in anchor.tolist()]})
        return seen

    one, other = run_workers(LocalWorld(2), work)
    return [{"worker-0": a, "worker-1": b} for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_golden_trace(name: str, request: pytest.FixtureRequest) -> None:
    path, found = GOLDEN / f"{name}.json", trace(name)
    if request.config.getoption("--regenerate-golden"):
        path.write_text(json.dumps(found, indent=None, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    expected = json.loads(path.read_text())
    assert len(found) == len(expected)
    for now, then in zip(found, expected, strict=True):
        for worker in ("worker-0", "worker-1"):
            assert now[worker]["step"] == then[worker]["step"]
            assert now[worker]["sent_bytes"] == then[worker]["sent_bytes"]
            assert now[worker]["anchor"] == pytest.approx(then[worker]["anchor"], rel=1e-6, abs=1e-7)
