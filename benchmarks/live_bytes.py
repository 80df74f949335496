"""Live bytes of a worker with an outer loop: its communication thread too, and what is offloaded apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from isthmus.outer import Offload, OuterLoop
from isthmus.tools.live_bytes import LiveBytes, LiveBytesMode


def follow(loop: OuterLoop, watch: LiveBytesMode) -> None:
    """Watch the communication thread, too, for good."""
    loop._thread.run(watch.__enter__)


class TwoPlaces(LiveBytes):
    """Live bytes that are counted apart where tensors are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self._offloaded: set[int] = set()

    def add_offloaded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors apart from now on until they are freed."""
        tensors = list(tensors)
        with self._lock:
            self._offloaded |= {tensor.untyped_storage()._cdata for tensor in tensors}
            self.add(tensors)

    def is_offloaded(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with what was offloaded."""
        return tensor.untyped_storage()._cdata in self._offloaded

    def now_offloaded(self) -> int:
        """Return the bytes of what is offloaded at this moment."""
        with self._lock:
            return super()._count() - self._count()

    @override
    def _count(self) -> int:
        total = super()._count()
        self._offloaded &= self._sizes.keys()
        return total - sum(self._sizes[key][1] for key in self._offloaded)


@dataclass(frozen=True)
class CountedOffload(Offload):
    """An offload whose memory is known to `live`, so that one device can stand for two."""

    live: TwoPlaces = field(default_factory=TwoPlaces)

    @override
    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        memory = super().allocate(like)
        self.live.add_offloaded([memory])
        return memory
