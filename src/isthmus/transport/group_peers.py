"""The peers of one sync, connected by a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from isthmus.core.streams import copy_to
from isthmus.core.torch_internals import all_gather_single
from isthmus.core.types import WorkerGroup
from isthmus.transport.base import TransportError
from isthmus.transport.peers import BufferPeers
from isthmus.transport.send_recv import SendRecv
from isthmus.transport.watched_group import NOT_JOINED, WatchedGroup, Works
from isthmus.transport.worker_group import SINGLE_RANK


class GroupPeers(BufferPeers):
    """The peers of one sync over one process group, or none where this worker is alone.

    `name` is that of the sync, for error messages; `device` is where the group's backend wants its buffers.
    """

    def __init__(
        self,
        group: WatchedGroup | None,
        rank: int,
        weights: list[float],
        name: str,
        device: str = "cpu",
        worker_group: WorkerGroup = SINGLE_RANK,
    ) -> None:
        super().__init__(rank, weights)
        self._group, self._name, self._device, self.worker_group = group, name, torch.device(device), worker_group
        self._seconds = 0.0 if group is None else 2 * group.sync_budget_seconds  # the group itself watches the time

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        total = self._staged(buffer)
        self._run("all_reduce", lambda group: [_work(dist.all_reduce(total, group=group, async_op=True))])
        return total.to(buffer.device)

    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        own = self._staged(buffer)
        result = own.new_empty(self.size, len(own))
        if self._device.type == "cpu":
            self._send_recv("all_gather", [own] * self.size, result)
        else:
            self._run("all_gather", lambda group: [all_gather_single(result.view(-1), own, group=group, async_op=True)])
        return result.view(-1).to(buffer.device)

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts, size = self._staged(buffer), sizes[self.rank]
        result = parts.new_empty(self.size, size)
        if self._device.type == "cpu":
            self._send_recv("all_to_all", torch.split(parts, sizes), result)
        else:
            start = partial(dist.all_to_all_single, result.view(-1), parts, [size] * self.size, sizes, async_op=True)
            self._run("all_to_all", lambda group: [_work(start(group=group))])
        return result.view(-1).to(buffer.device)

    def _send_recv(self, kind: str, outgoing: Sequence[torch.Tensor], incoming: torch.Tensor) -> None:
        """Send each member its tensor of `outgoing`, and fill the rows of `incoming`, one from each member."""
        rows = list(incoming)
        self._run(kind, lambda group: [SendRecv(group, self.rank, outgoing, rows, self._seconds)])

    def _staged(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer where the backend wants it; the training stream does not wait for the copy."""
        return buffer if buffer.device.type == self._device.type else copy_to(buffer, self._device)

    def _run(self, kind: str, start: Callable[[dist.ProcessGroup], Works]) -> None:
        what = f"{kind} of {self._name}"
        if self._group is None:
            raise TransportError(f"{what}: {NOT_JOINED}")
        self._group.run(what, start)


def _work(started: dist.Work | None) -> dist.Work:
    """Return the work of a collective that was started with `async_op`."""
    assert started is not None
    return started
