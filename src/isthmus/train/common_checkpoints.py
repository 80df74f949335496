"""The checkpoints that all workers hold: a run goes on only from one of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from isthmus.transport import PeerLost, Transport

_MOST_STEPS = 64  # that ranks compare when they resume


class MissingCheckpoints:
    """The steps whose checkpoint some worker could not write: a run does not go on from there.

    Args:
        store: reaches all workers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, step: int) -> None:
        """Tell the other workers, before this one takes part in another sync."""
        with _lost_store():
            self._store.set(f"unsaved/{step}", "")

    def __contains__(self, step: object) -> bool:
        """Whether any worker lacks the checkpoint of this step."""
        with _lost_store():
            return bool(self._store.check([f"unsaved/{step}"]))


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost([], "the store is gone, and with it the process that holds it") from error


def newest_common(steps: list[int], transport: Transport) -> int | None:
    """Return the largest step that is in the lists of all ranks, which all make this call, before any sync."""
    peers = transport.quorum(0)
    for gather in (peers.worker_group.all_gather, peers.all_gather):  # then all ranks of all workers know
        own = torch.full((_MOST_STEPS,), -1, dtype=torch.int64)
        newest = sorted(steps)[-_MOST_STEPS:]
        own[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
        lists = [{step for step in theirs.tolist() if step >= 0} for (theirs,) in gather([own])]
        steps = list(set.intersection(*lists))
    return max(steps, default=None)
