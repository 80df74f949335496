"""Workers as threads of one process, joined by barriers: the smallest `Peers` that compressors can be tested on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isthmus.core.types import Peers, Tensors
from isthmus.transport.peers import BufferPeers

torch.set_num_threads(1)


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Room:
    """Where the threads meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size


class ThreadPeers:
    all_gather_parts, all_to_all_parts = BufferPeers.all_gather_parts, BufferPeers.all_to_all_parts

    def __init__(self, rank: int, weights: list[float], room: Room) -> None:
        self.rank, self.size, self.weights, self.room = rank, len(weights), weights, room
        self.sent_bytes = self.received_bytes = 0

    def _share(self, value: Any) -> list[Any]:
        self.room.slots[self.rank] = value
        self.room.barrier.wait()
        everybody = list(self.room.slots)
        self.room.barrier.wait()
        return everybody

    def all_reduce_mean(self, tensors: Tensors) -> Tensors:
        everybody = self._share([tensor.clone() for tensor in tensors])
        self.sent_bytes += (self.size - 1) * num_bytes(tensors)
        pairs = [pair for pair in zip(everybody, self.weights, strict=True) if pair[1] > 0]
        return [sum(own[i] * weight for own, weight in pairs) for i in range(len(tensors))]

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        everybody = self._share([tensor.clone() for tensor in tensors])
        assert len({tuple((t.shape, t.dtype) for t in own) for own in everybody}) == 1
        self.sent_bytes += (self.size - 1) * num_bytes(tensors)
        return everybody

    def all_to_all(self, parts: list[Tensors]) -> list[Tensors]:
        everybody = self._share([[tensor.clone() for tensor in part] for part in parts])
        self.sent_bytes += sum(num_bytes(part) for rank, part in enumerate(parts) if rank != self.rank)
        received = [sent[self.rank] for sent in everybody]
        assert all([t.shape for t in part] == [t.shape for t in parts[self.rank]] for part in received)
        return received


def run_workers(function: Callable[[Peers], Any], num_workers: int, weights: list[float] | None = None) -> list[Any]:
    """Run `function(peers)` on one thread per worker; return the results in rank order."""
    weights = weights or [1 / num_workers] * num_workers
    room, results, errors = Room(num_workers), [None] * num_workers, []

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = function(ThreadPeers(rank, weights, room))
        except Exception as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through a codec: compiled kernels and plain torch."""
    monkeypatch.setenv("ISTHMUS_NATIVE", "1" if request.param == "native" else "0")
    return request.param
