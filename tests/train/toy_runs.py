"""A model of a few hundred parameters, with blocks: a whole run of it takes a fraction of a second."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tests.train.worker_processes import events, final_weights
from torch import nn

from isthmus.config import RunConfig
from isthmus.recipes import load_config
from isthmus.train.worker import train

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it all again\n"


class Toy(nn.Module):
    """Predicts the next byte modulo 16, with dropout, so that random numbers matter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 16)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"] % 16
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = hidden + torch.tanh(self.dropout(block(hidden)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def toy_config(folder: Path, *overrides: str) -> RunConfig:
    """A run of 12 steps of one worker alone, in `folder / "run"`."""
    text = folder / "text.txt"
    text.write_text(WORDS * 40)
    base = [
        "model.type=module",
        f"model.path={__name__}:Toy",
        "model.sequence_length=8",
        f"data.source={text}",
        "inner.batch_size=4",
        "inner.optimizer.lr=1e-2",
        "outer.schedule.local_steps=4",
        "outer.schedule.warm_start_steps=0",  # no start; these two follow the length of a run, which may grow
        "outer.schedule.warm_start_every=1",
        "train.steps=12",
        "train.log_every=1",
        "train.eval_every=5",
        "train.eval_batches=2",
        "train.checkpoint_every=5",
        f"train.run_dir={folder / 'run'}",
    ]
    return load_config(None, [*base, *overrides])


def assert_resumes_alike(config: RunConfig, steps: Iterable[int]) -> None:
    """A run of one worker, taken up after each of these steps, latest first, ends with the same bits."""
    run_dir = Path(config.train.run_dir)
    train(config)
    expected, weights = events(run_dir, 0), final_weights(run_dir, 0)
    for step in steps:
        for path in (run_dir / "checkpoints").iterdir():
            if int(path.name[5:]) > step:
                shutil.rmtree(path)
        train(config, resume=True)
        assert events(run_dir, 0) == expected, step
        assert final_weights(run_dir, 0) == weights, step
