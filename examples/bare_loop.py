"""Your own training loop, three lines added; start as many workers as you like.

torchrun --nproc-per-node 2 examples/bare_loop.py
"""

import os

import torch
from torch import nn

from isthmus import attach

STEPS = 200


def main() -> None:
    """Learn to tell two spirals apart, each worker on points of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all workers start from the same weights
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer_loop = attach("diloco", model, steps=STEPS, local_steps=10)  # 1: join the others

    rank = int(os.environ.get("RANK", "0"))
    points = torch.Generator().manual_seed(1000 + rank)
    for step in range(1, STEPS + 1):
        inputs, labels = spirals(128, points)
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outer_loop.step()  # 2: after every inner step
        if step % 50 == 0:
            print(f"worker {rank} step {step} loss {loss.item():.4f}", flush=True)

    outer_loop.finish()  # 3: land what is in flight; now all workers hold the same model
    print(f"worker {rank} anchor {outer_loop.anchor_hash()}", flush=True)
    outer_loop.close()


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two interleaved spirals [count, 2] and which of them they lie on [count]."""
    labels = torch.randint(0, 2, (count,), generator=generator).float()
    angle = 6 * torch.rand(count, generator=generator)
    turned = angle + torch.pi * labels
    return torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 6, labels


if __name__ == "__main__":
    main()
