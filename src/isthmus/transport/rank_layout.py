"""The layout of a world's ranks: a rank's worker and its peers."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.types import UserError


@dataclass(frozen=True)
class RankLayout:
    """The ranks of all workers, one worker after the other, each of equally many ranks.

    Attributes:
        size: the number of all ranks.
        per_worker: the number of ranks of a worker.
    """

    size: int
    per_worker: int = 1

    def check(self, expected_workers: int | None) -> None:
        """Raise `UserError` where the ranks are not as many as the configuration says, or do not make whole workers."""
        started = f"{self.size} rank{'s' if self.size > 1 else ''} started"
        if expected_workers not in (None, self.size / self.per_worker):
            workers = f"{expected_workers} worker{'s' if expected_workers != 1 else ''}"
            of_ranks = f" of {self.per_worker} ranks" if self.per_worker > 1 else ""
            raise UserError(f"the configuration says {workers}{of_ranks}, but {started}")
        if self.size % self.per_worker:
            raise UserError(f"a worker has {self.per_worker} ranks, but {started}: start a multiple of that")

    def peers_of(self, rank: int) -> range:
        """Return the ranks that hold the same part of the model, one of each worker."""
        return range(rank % self.per_worker, self.size, self.per_worker)

    def of_worker(self, rank: int) -> range:
        """Return the ranks of the same worker."""
        first = rank - rank % self.per_worker
        return range(first, first + self.per_worker)

    def name(self, rank: int, host: str = "") -> str:
        """Return what to call a rank: 'worker 1', or 'worker 1 (rank 3, host x)'."""
        details = [f"rank {rank}"] if self.per_worker > 1 else []
        details += [f"host {host}"] if host else []
        return f"worker {rank // self.per_worker}" + (f" ({', '.join(details)})" if details else "")
