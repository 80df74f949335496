"""This machine: its name, how long work takes here, and how fast it multiplies matrices."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from isthmus.core.streams import drain

_LEAST_CALLS, _LEAST_SECONDS = 3, 1.0


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or that of the processor and how many threads torch has there."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    count = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {count} thread{'s' * (count > 1)}"


def median_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has done one call: the median of a few, after one that warms up."""
    return median(_repeat(work))


def matrix_size(device: torch.device) -> int:
    """Return the size of the square matrices that are multiplied: large enough to keep the device busy."""
    return 8192 if device.type == "cuda" else 1024


@torch.no_grad()
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the additions and multiplications a second of the fastest of several products of two square matrices.

    This is what the device does here and now, with what else runs on it, not what its data sheet says.
    """
    size = matrix_size(device)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / min(_repeat(lambda: torch.mm(left, right, out=product)))


def _repeat(work: Callable[[], Any]) -> list[float]:
    work()
    taken = list[float]()
    while len(taken) < _LEAST_CALLS or sum(taken) < _LEAST_SECONDS:
        drain()
        begin = time.perf_counter()
        work()
        drain()
        taken.append(time.perf_counter() - begin)
    return taken
