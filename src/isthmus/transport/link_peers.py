"""The collectives over a link: each worker exchanges directly with each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from isthmus.core.streams import copy_to
from isthmus.core.types import Tensors, WorkerGroup
from isthmus.link import Group, MemberLost
from isthmus.transport.base import PeerLost, RankLost, TransportError
from isthmus.transport.peers import BufferPeers
from isthmus.transport.shared_notes import SharedNotes
from isthmus.transport.wire import all_gather_object, each_from_buffer, num_bytes, to_buffer
from isthmus.transport.worker_group import SINGLE_RANK

NOT_JOINED = "this worker has not joined, or has left"
_NOTHING = memoryview(b"")
_PIECE_VALUES = 1 << 19  # of a reduction: the sums of one cross while the next ones come in


class LinkPeers(BufferPeers):
    """The peers of one sync over a group of the link, or none where this worker is alone.

    Everything crosses once, a reduction twice: each worker sums the part that it owns of all messages, in rank
    order, and sends the sum to the others.

    Args:
        group: of the link.
        rank, weights: see `BufferPeers`.
        name: of the sync, for error messages.
        sync_budget_seconds: bound on one collective.
        worker_group: this worker's ranks.
    """

    def __init__(
        self,
        group: Group | None,
        rank: int,
        weights: list[float],
        name: str,
        sync_budget_seconds: float,
        worker_group: WorkerGroup = SINGLE_RANK,
    ) -> None:
        super().__init__(rank, weights)
        self.worker_group = worker_group
        self.arrival: tuple[int, float] | None = None  # an exchange before the first collective's, and its seconds
        self._group, self._name, self._seconds = group, name, sync_budget_seconds

    @override
    def connections_to(self, rank: int) -> int:
        return self._joined("connections_to")[0].num_bulk_lanes(rank)

    @override
    def exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], num_connections: int | None = None
    ) -> None:
        group, what = self._joined("exchange")
        group.use_bulk_lanes(num_connections)
        try:
            self._finish(group, what, start(group, what, outgoing, incoming))
        finally:
            group.use_bulk_lanes(None)

    @override
    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        values = _host_memory(buffer, buffer.shape) if buffer.is_cuda else buffer
        parts, origins = values.tensor_split(self.size), buffer.tensor_split(self.size)
        theirs = parts[self.rank].new_empty(self.size, len(parts[self.rank]))
        pieces = [slice(begin, begin + _PIECE_VALUES) for begin in range(0, len(parts[0]), _PIECE_VALUES)]
        group, what = self._joined("all_reduce")
        first, second = [], []
        for piece in pieces:  # of a GPU's values, the next ones are copied while these cross
            _copy_pieces(origins, parts, piece)
            first.append(start(group, what, [part[piece] for part in parts], list(theirs[:, piece])))
        for shot, piece in zip(first, pieces, strict=True):
            self._finish(group, what, shot)
            own = parts[self.rank][piece]
            theirs[self.rank, piece] = own
            own[:] = theirs[0, piece]
            for their in theirs[1:, piece]:
                own += their
            second.append(start(group, what, [own] * self.size, [part[piece] for part in parts]))
        for shot, piece in zip(second, pieces, strict=True):
            self._finish(group, what, shot)
            _copy_pieces(parts, origins, piece)
        return buffer

    @override
    def all_gather_parts(self, parts: Iterable[Tensors]) -> Iterator[list[Tensors]]:
        if self.size == 1:
            yield from super().all_gather_parts(parts)
            return
        for part, wait in [(part, self._start_all_gather(to_buffer(part))) for part in parts]:
            buffer = wait()
            self._count(*[len(buffer) // self.size * (self.size - 1)] * 2)
            yield each_from_buffer(buffer, part, self.size)

    @override
    def all_to_all_parts(self, parts: Iterable[list[Tensors]]) -> Iterator[list[Tensors]]:
        if self.size == 1:
            yield from super().all_to_all_parts(parts)
            return
        started = []
        for part in parts:
            buffer, sizes = to_buffer([tensor for each in part for tensor in each]), [num_bytes(each) for each in part]
            started.append((part[self.rank], self._start_all_to_all(buffer, sizes)))
            self._count(len(buffer) - sizes[self.rank], (self.size - 1) * sizes[self.rank])
        for like, wait in started:
            yield each_from_buffer(wait(), like, self.size)

    @override
    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._start_all_gather(buffer)()

    @override
    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return self._start_all_to_all(buffer, sizes)()

    def _start_all_gather(self, buffer: torch.Tensor) -> Callable[[], torch.Tensor]:
        own = copy_to(buffer, torch.device("cpu")) if buffer.is_cuda else buffer
        result = _host_memory(buffer, (self.size, len(own)))
        return self._start("all_gather", [own] * self.size, result, buffer.device)

    def _start_all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> Callable[[], torch.Tensor]:
        parts = (copy_to(buffer, torch.device("cpu")) if buffer.is_cuda else buffer).split_with_sizes(sizes)
        result = _host_memory(buffer, (self.size, sizes[self.rank]))
        return self._start("all_to_all", parts, result, buffer.device)

    def _start(
        self, kind: str, outgoing: Sequence[torch.Tensor], result: torch.Tensor, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        """Begin to send every peer its tensor; returns what waits for theirs, and then returns `result` as one row."""
        group, what = self._joined(kind)
        result[self.rank] = outgoing[self.rank]
        number = start(group, what, outgoing, list(result))

        def wait() -> torch.Tensor:
            self._finish(group, what, number)
            return result.view(-1).to(device, non_blocking=True)  # from pinned memory, while the next ones come in

        return wait

    def _finish(self, group: Group, what: str, number: int) -> None:
        """Wait for an exchange, and before the first one for that in which all say that they are there."""
        if self.arrival is not None:
            arrival, seconds = self.arrival
            self.arrival = None
            finish(group, what, arrival, seconds)
        finish(group, what, number, self._seconds)

    def _joined(self, kind: str) -> tuple[Group, str]:
        what = f"{kind} of {self._name}"
        if self._group is None or self._group.left:
            raise TransportError(f"{what}: {NOT_JOINED}")
        return self._group, what


class LinkWorkerGroup:
    """The ranks of a worker that has several; see `isthmus.core.types.WorkerGroup`."""

    def __init__(self, group: Group, budget_seconds: float, close: Callable[[], None] | None = None) -> None:
        self.rank, self.size = group.rank, len(group.members)
        self.close = close or group.close
        self._group, self._seconds = group, budget_seconds

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return the tensors of all ranks in rank order; shapes and dtypes must be equal.

        Raises:
            RankLost: one of the ranks is gone.
        """
        what = "all_gather inside the worker"
        if self._group.left:
            raise TransportError(f"{what}: {NOT_JOINED}")
        own = to_buffer(tensors)
        result = own.new_empty(self.size, len(own), device="cpu")
        try:
            shot = start(self._group, what, [own.cpu()] * self.size, list(result))
            finish(self._group, what, shot, self._seconds)
        except PeerLost as lost:
            raise RankLost(lost.ranks, str(lost)) from lost
        result[self.rank] = own
        return each_from_buffer(result.view(-1).to(own.device), tensors, self.size)

    def all_gather_object(self, value: object) -> list[object]:
        """Return the values of all ranks in rank order: whatever JSON can hold."""
        return all_gather_object(self.all_gather, value)

    @property
    def notes(self) -> SharedNotes:
        """What the ranks tell one another once and for all."""
        return SharedNotes(self._group)

    def check(self) -> None:
        """Raise `RankLost` where a rank of this worker is gone."""
        try:
            self._group.check()
        except MemberLost as lost:
            raise RankLost(lost.ranks, str(lost)) from lost


def start(group: Group, what: str, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> int:
    """Begin to send every member its tensor, and to fill a tensor for every member's; returns the number to `finish`.

    All tensors are contiguous, on the CPU.
    """
    with _lost_peers(what):
        return group.start([_bytes_of(each) for each in outgoing], [_bytes_of(each) for each in incoming])


def finish(group: Group, what: str, number: int, seconds: float) -> None:
    """Wait until all tensors of a `start` are sent and received.

    Raises:
        PeerLost: somebody is gone, or did not take part in time.
    """
    with _lost_peers(what):
        group.wait(number, seconds)


def _host_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return memory for values of a tensor's dtype, pinned where that is on a GPU."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _copy_pieces(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], piece: slice) -> None:
    """Copy a piece of every tensor to or from a GPU; in CPU memory sources and targets are the same."""
    if sources[0].device == targets[0].device:
        return
    for source, target in zip(sources, targets, strict=True):
        target[piece].copy_(source[piece], non_blocking=True)
    torch.cuda.current_stream((sources if sources[0].is_cuda else targets)[0].device).synchronize()


@contextmanager
def _lost_peers(what: str) -> Iterator[None]:
    try:
        yield
    except MemberLost as lost:
        raise PeerLost(lost.ranks, f"{what} failed: {lost}") from lost


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else _NOTHING  # type: ignore[arg-type]
