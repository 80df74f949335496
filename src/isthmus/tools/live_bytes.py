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
    """The bytes of the tensors of watched threads, now and at most since `peak` was last set."""

    def __init__(self) -> None:
        self.peak = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # of storages; the weak reference keeps their ids unique
        self._lock = threading.RLock()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors from now on until they are freed."""
        with self._lock:
            before = len(self._sizes)
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = _WEAK_REFERENCE(storage), storage.nbytes()
            if len(self._sizes) > before:
                self.peak = max(self.peak, self._count())

    def now(self) -> int:
        """Return the bytes at this moment."""
        with self._lock:
            return self._count()

    def _count(self) -> int:
        for key in [key for key, (storage, _) in self._sizes.items() if storage.expired()]:
            del self._sizes[key]
        return sum(size for _, size in self._sizes.values())


class LiveBytesMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that operations make, on the thread that enters it."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
