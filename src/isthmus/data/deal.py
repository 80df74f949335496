"""Who reads which shards of a streamed epoch, and who goes on with what when the number of workers changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isthmus.data.shuffle import permute

# {"epoch", "shard", "part", "parts", "position", "taken"}: every parts-th row of a shard, not yet read to its end; what
# is left begins at the position, but for the rows with the numbers `taken`
ShardPart = dict[str, Any]


def assign_shards(num_shards: int, seed: int, epoch: int, worker: int, num_workers: int) -> list[ShardPart]:
    """One worker's pieces of an epoch, in the order in which it reads them; disjoint, and all workers' are everything.

    A piece is a whole shard where every worker can have one; else every k-th row of a shard, which then k workers read.
    """
    parts = -(-num_workers // num_shards)
    size = num_shards * parts
    mine = permute(np.arange(size), size, f"{seed}/{epoch}/shards")[worker::num_workers].tolist()
    return [
        {"epoch": epoch, "shard": i // parts, "part": i % parts, "parts": parts, "position": None, "taken": []}
        for i in mine
    ]


def reassign_shards(states: list[dict[str, Any]], num_workers: int) -> list[dict[str, Any]]:
    """Positions for another number of workers. Together they stand where the former ones stood: nothing is lost.

    What is unread of the epochs that were begun is dealt out. Who then has nothing begins the next epoch.

    Args:
        states: of the streams of all workers, in the workers' order, saved after the same step.
        num_workers: from now on.

    Returns:
        One state for each worker.
    """
    first, latest = states[0], max(state["epoch"] for state in states)
    num_shards, seed = first["num_shards"], first["seed"]
    pieces = [piece for state in states for piece in state["pieces"]]
    for worker, state in enumerate(states):  # who was behind had the rest of these epochs still to come
        for epoch in range(state["epoch"] + 1, latest + 1):
            pieces += assign_shards(num_shards, seed, epoch, worker, len(states))
    return [
        {**first, "epoch": latest, "pieces": pieces[worker::num_workers], **_tokens(states, worker, num_workers)}
        for worker in range(num_workers)
    ]


def _tokens(states: list[dict[str, Any]], worker: int, num_workers: int) -> dict[str, torch.Tensor]:
    """A worker's share of the text that was read and not yet taken; nothing where positions go back to the rows."""
    if "windows" not in states[0]:
        return {}
    windows = torch.cat([state["windows"] for state in states])
    rests = [state["rest"] for state in states]
    return {
        "windows": windows[worker::num_workers].contiguous(),
        "rest": torch.cat([windows.new_empty(0), *rests[worker::num_workers]]),
    }
