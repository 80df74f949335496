"""A model that needs no transformers, for processes that must start quickly."""

import os
import subprocess
import time
from pathlib import Path

import torch
from torch import nn


class Bigram(nn.Module):
    """The next byte from this one: {"tokens": [batch, seq + 1]} -> mean loss."""

    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden_size)
        self.head = nn.Linear(hidden_size, 256)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        return nn.functional.cross_entropy(
            self.head(self.embedding(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten()
        )


class Paced(Bigram):
    """Takes its time until a file exists."""

    def __init__(self, hidden_size: int, go: str, seconds: float = 0.02) -> None:
        super().__init__(hidden_size)
        self.go, self.seconds = Path(go), seconds

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.go.exists():
            time.sleep(self.seconds)
        return super().forward(batch)


class Explosive(Bigram):
    """On worker 1 its weights grow a thousandfold at some training steps, counted from 1."""

    def __init__(self, hidden_size: int, at: list[int]) -> None:
        super().__init__(hidden_size)
        self.at, self.steps = at, 0

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += self.training
        if self.training and self.steps in self.at and os.environ.get("RANK") == "1":
            with torch.no_grad():
                for param in self.parameters():
                    param *= 1000.0
        return super().forward(batch)


class WithOrphan(Bigram):
    """Leaves a process behind that ends soon, and whose parent has ended before."""

    def __init__(self, hidden_size: int = 4) -> None:
        super().__init__(hidden_size)
        subprocess.run(["sh", "-c", "sleep 0.3 &"], check=True)
