"""Bytes of live tensors, counted where operations make them: a worker's memory without the allocator's part."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from isthmus.core.torch_internals import TorchDispatchMode, tree_leaves

_WEAK_REFERENCE: Any = StorageWeakRef


class LiveBytes:
    """The bytes of the tensors of watched threads, now and at most since `peak` was last set; offloaded ones apart."""

    def __init__(self) -> None:
        self.peak = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # of storages; the weak reference keeps their ids unique
        self._offloaded: set[int] = set()
        self._lock = threading.Lock()

    def add(self, tensors: Iterable[torch.Tensor], offloaded: bool = False) -> None:
        """Count these tensors from now on until they are freed."""
        with self._lock:
            before = len(self._sizes)
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = _WEAK_REFERENCE(storage), storage.nbytes()
                if offloaded:
                    self._offloaded.add(storage._cdata)
            if len(self._sizes) > before:
                self.peak = max(self.peak, self._count(offloaded=False))

    def now(self, offloaded: bool = False) -> int:
        """Return the bytes at this moment: of what is offloaded, or of all else."""
        with self._lock:
            return self._count(offloaded)

    def is_offloaded(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with what was offloaded."""
        return tensor.untyped_storage()._cdata in self._offloaded

    def _count(self, offloaded: bool) -> int:
        for key in [key for key, (storage, _) in self._sizes.items() if storage.expired()]:
            del self._sizes[key]
            self._offloaded.discard(key)
        return sum(size for key, (_, size) in self._sizes.items() if (key in self._offloaded) == offloaded)


class LiveBytesMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that operations make, on the thread that enters it."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
