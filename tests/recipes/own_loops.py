"""Training loops as somebody else might have written them, with an outer loop attached; each worker is a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from isthmus import attach
from isthmus.core import UserError
from isthmus.outer import OuterLoop, fingerprint

STEPS, SAVED_AT = 20, 11  # after a sync was sent and before it is due, where a recipe overlaps at all
SMALL: dict[str, dict[str, Any]] = {  # settings at which so small a run does what a recipe is made for
    "streaming": {"overlap_steps": 3},
    "eager": {"overlap_steps": 8},
    "dilocox": {
        "overlap_steps": 8,
        "compressor": {"type": "error_feedback", "compressor": {"type": "low_rank", "rank": 2}},
    },
}
BLOCKS = 4


class Blocks(nn.Module):
    """A little tower of blocks, with dropout that depends on the random numbers of each worker."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(BLOCKS))
        for param in self.parameters():
            nn.init.normal_(param, std=0.2, generator=generator)
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + nn.functional.dropout(block(inputs), 0.1).tanh()
        return inputs


class Run:
    """One worker's training: ordinary PyTorch, accumulating over two batches, and an outer loop."""

    def __init__(self, rank: int, name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(rank)
        self.rank, self.step = rank, 0
        self.model = Blocks(seed, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.arguments = (name, self.model, STEPS, 8)
        self.options = {"warm_start_steps": 2, "warm_start_every": 1, "hash_every": 1, **SMALL.get(name, {}), **options}
        self.outer_loop: OuterLoop | None = None

    def attach(self, **more: Any) -> None:
        self.outer_loop = attach(*self.arguments, **self.options, **more)

    def train(self, until: int) -> None:
        assert self.outer_loop is not None
        while self.step < until:
            self.step += 1
            for number in range(2):
                generator = torch.Generator().manual_seed(1000 * self.step + 10 * self.rank + number)
                inputs = torch.randn(4, 16, generator=generator).to(self.model.blocks[0].weight.dtype)
                (self.model(inputs) - inputs.roll(1, dims=1)).square().mean().div(2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer_loop.step()

    def end(self) -> dict[str, Any]:
        """Everything that two equal runs must have alike."""
        assert self.outer_loop is not None
        before = fingerprint(self.model.parameters()).hex()
        self.outer_loop.finish()
        outer = self.outer_loop.state_dict()["outer_optimizer"]["state"]
        momentum = [tensor for state in outer.values() for tensor in state.values()]
        anchors = [anchor for fragment in self.outer_loop.state.fragments for anchor in fragment.anchor]
        assert all(anchor.dtype == torch.float32 for anchor in anchors)
        assert all(torch.isfinite(param).all() for param in self.model.parameters())
        self.outer_loop.close()
        return {
            "before the last sync": before,
            "parameters": fingerprint(self.model.parameters()).hex(),
            "anchors": fingerprint(anchors).hex(),
            "outer optimizer": fingerprint(momentum).hex(),
            "inner steps": self.outer_loop.state.inner_steps,
        }

    def save(self, path: Path) -> None:
        assert self.outer_loop is not None
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "outer_loop": self.outer_loop.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
        }
        torch.save(content, path)

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]


def resumed(rank: int, name: str, folder: str, **options: Any) -> dict[str, Any]:
    """Train to the end in one go, and twice from what was saved on the way: in either order of loading."""
    whole = Run(rank, name, **options)
    whole.attach()
    whole.train(SAVED_AT)
    path = Path(folder) / f"{name}-{rank}.pt"
    whole.save(path)
    in_flight = len(whole.outer_loop.state_dict()["in_flight"])
    whole.train(STEPS)
    ends = [whole.end()]

    for model_first in (True, False):
        saved = torch.load(path, weights_only=True)
        again = Run(rank, name, seed=int(model_first), **options)  # where it can be of other weights it is
        if model_first:
            again.load(saved)
            again.attach(state_dict=saved["outer_loop"])
        else:
            again.attach()
            again.load(saved)
            again.outer_loop.load_state_dict(saved["outer_loop"])
        torch.set_rng_state(saved["random"])
        again.train(STEPS)
        ends.append(again.end())
    return {"in flight": in_flight, "ends": ends}


def all_resumed(rank: int, runs: list[tuple[str, dict[str, Any]]], folder: str) -> list[dict[str, Any]]:
    return [resumed(rank, name, folder, **options) for name, options in runs]


def refusals(rank: int, folder: str) -> dict[str, str]:
    """What is said to workers that do not fit together, one attempt after the other in the same processes."""

    def attempt(run: Run, **more: Any) -> str:
        try:
            run.attach(**more)
        except UserError as error:
            return str(error)
        return "nothing"

    said = {
        "weights": attempt(Run(rank, "diloco", seed=rank)),
        "arguments": attempt(Run(rank, "diloco", overlap_steps=rank)),
    }
    run = Run(rank, "diloco")
    fully_shard(run.model)
    said["sharded over both"] = attempt(run)
    run = Run(rank, "diloco")
    run.attach()
    saved = {}
    for step in (SAVED_AT, SAVED_AT + 1):
        run.train(step)
        run.save(Path(folder) / f"{rank}.pt")
        saved[step] = torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
    run.end()
    run = Run(rank, "diloco")
    run.load(saved[SAVED_AT])
    said["saved weights, but no state"] = attempt(run)
    said["saved steps"] = attempt(run, state_dict=saved[SAVED_AT + rank]["outer_loop"])
    return said
