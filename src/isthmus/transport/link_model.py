"""The seconds that collectives take on modelled links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.types import UserError

PerLink = float | Sequence[Sequence[float]]  # one value for all links, or one per [sender][receiver]


@dataclass(frozen=True)
class LinkModel:
    """The bandwidth and latency of every link, [sender][receiver]. Links do not slow each other down.

    A worker sends one message at a time and receives one at a time (its uplink and its downlink are what is slow).
    """

    bandwidth: Sequence[Sequence[float]]  # bits per second
    latency: Sequence[Sequence[float]]  # seconds

    @classmethod
    def between(
        cls, num_workers: int, bandwidth_bits_per_second: PerLink | None, latency_seconds: PerLink
    ) -> LinkModel:
        """Return the model of all links between `num_workers`; a bandwidth of None is infinite."""
        bandwidth = float("inf") if bandwidth_bits_per_second is None else bandwidth_bits_per_second
        return cls(_matrix("bandwidth", bandwidth, num_workers), _matrix("latency", latency_seconds, num_workers))

    def ring_seconds(self, num_steps: int, step_bytes: float) -> float:
        """Return the seconds of `num_steps` steps in each of which every rank sends `step_bytes` to the next one."""
        size = len(self.latency)
        hops = [(rank, (rank + 1) % size) for rank in range(size)]
        return num_steps * max(self.latency[a][b] + 8 * step_bytes / self.bandwidth[a][b] for a, b in hops)

    def all_to_all_seconds(self, num_bytes: list[list[int]]) -> float:
        """Return the seconds in which every rank sends `num_bytes[sender][receiver]` straight to every other one."""
        ranks = range(len(self.latency))
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        up, down = [0.0 for _ in ranks], [0.0 for _ in ranks]
        for a, b in pairs:
            seconds = 8 * num_bytes[a][b] / self.bandwidth[a][b]
            up[a] += seconds
            down[b] += seconds
        return max(up + down) + max((self.latency[a][b] for a, b in pairs), default=0.0)


def _matrix(name: str, value: PerLink, size: int) -> Sequence[Sequence[float]]:
    if isinstance(value, (int, float)):
        return [[float(value)] * size for _ in range(size)]
    if len(value) != size or any(len(row) != size for row in value):
        raise UserError(f"{name}: give one number, or {size} rows of {size} (sender x receiver)")
    return value
