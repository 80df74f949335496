"""Which checkpoints all workers hold: a run goes on only from such a one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import Store

from isthmus.transport import PeerLost, Transport

_MOST = 64  # that ranks compare when they resume


class Unsaved:
    """Steps whose checkpoint some worker could not write: a run goes on only from a step that all hold.

    Args:
        store: reaches all workers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, step: int) -> None:
        """Tell the others, before this worker takes part in another sync."""
        with _lost_store():
            self._store.set(f"unsaved/{step}", "")

    def __contains__(self, step: object) -> bool:
        """Whether any worker lacks it."""
        with _lost_store():
            return bool(self._store.check([f"unsaved/{step}"]))


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost([], "the store is gone, and with it the process that holds it") from error


def newest_common(steps: list[int], transport: Transport) -> int | None:
    """The largest step that is in everybody's list; to be called by all ranks, before any sync."""
    peers = transport.quorum(0)
    for gather in (peers.worker_group.all_gather, peers.all_gather):  # then all ranks of all workers know
        own = torch.full((_MOST,), -1, dtype=torch.int64)
        newest = sorted(steps)[-_MOST:]
        own[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
        lists = [{step for step in theirs.tolist() if step >= 0} for (theirs,) in gather([own])]
        steps = list(set.intersection(*lists))
    return max(steps, default=None)
