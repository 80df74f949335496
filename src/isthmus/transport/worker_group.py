"""The ranks of one worker: near one another, and of one mind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isthmus.core.types import Tensors
from isthmus.transport.base import PeerLost, RankLost
from isthmus.transport.wire import pack, unpack_each

if TYPE_CHECKING:
    from isthmus.transport.watched_group import WatchedGroup

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


class GlooWorkerGroup:
    """What the ranks of a worker tell one another; all of them make the same calls in the same order.

    Args:
        rank: of this one in the worker.
        size: how many there are.
        group: connects them; None where the worker has one rank.
        close: lets go of them.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: WatchedGroup | None = None, close: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size, self.close, self._group = rank, size, close, group

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Those of all ranks, in order; shapes and dtypes must be equal.

        Raises:
            RankLost: one of them is gone.
        """
        if self._group is None:
            return [tensors]
        own = pack(tensors)
        result = own.new_empty(self.size * len(own))
        try:
            self._group.run(
                "gather inside the worker",
                lambda group: [all_gather(result, own, group=group, async_op=True)],
            )
        except PeerLost as lost:
            raise RankLost(lost.ranks, str(lost)) from lost
        return unpack_each(result, tensors, self.size)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in order: whatever JSON can hold."""
        if self._group is None:
            return [value]
        text = json.dumps(value).encode()
        sizes = [int(size) for (size,) in self.all_gather([torch.tensor(len(text))])]
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
        return [json.loads(bytes(theirs.tolist())) for (theirs,) in self.all_gather([padded])]

    def check(self) -> None:
        """Look whether all are there.

        Raises:
            RankLost: one is gone.
        """
        verdict = self._group.find_lost() if self._group is not None else None
        if verdict is not None:
            raise RankLost(verdict.ranks, verdict.reason)


SINGLE_RANK = GlooWorkerGroup()
