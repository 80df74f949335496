"""The group of a worker's own ranks where there is only one."""

from __future__ import annotations

from typing import Any

from isthmus.core.types import Tensors, WorkerGroup


class SingleRank:
    """The only rank of its worker; see `isthmus.core.types.WorkerGroup`."""

    rank, size = 0, 1

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return this rank's own tensors."""
        return [tensors]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return this rank's own value."""
        return [value]

    def check(self) -> None:
        """Do nothing: no other rank can be lost."""

    def close(self) -> None:
        """Do nothing: no other rank is connected."""


SINGLE_RANK: WorkerGroup = SingleRank()
