"""The process group of one worker's own ranks, which decide everything alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus.core.torch_internals import all_gather_single
from isthmus.core.types import Tensors, WorkerGroup
from isthmus.transport.base import PeerLost, RankLost
from isthmus.transport.watched_group import WatchedGroup
from isthmus.transport.wire import all_gather_object, each_from_buffer, to_buffer


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


class GlooWorkerGroup:
    """The ranks of a worker that has several, connected by gloo; all of them make the same calls in the same order."""

    def __init__(self, rank: int, size: int, group: WatchedGroup, close: Callable[[], None]) -> None:
        self.rank, self.size, self.close, self._group = rank, size, close, group

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return the tensors of all ranks in rank order; shapes and dtypes must be equal."""
        own = to_buffer(tensors)
        result = own.new_empty(self.size * len(own))
        try:
            self._group.run(
                "all_gather inside the worker",
                lambda group: [all_gather_single(result, own, group=group, async_op=True)],
            )
        except PeerLost as lost:
            raise RankLost(lost.ranks, str(lost)) from lost
        return each_from_buffer(result, tensors, self.size)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order: whatever JSON can hold."""
        return all_gather_object(self.all_gather, value)

    def check(self) -> None:
        """Raise `RankLost` where a rank of this worker is gone."""
        verdict = self._group.find_lost()
        if verdict is not None:
            raise RankLost(verdict.ranks, verdict.reason)
