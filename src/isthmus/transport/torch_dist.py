"""A static world over torch.distributed: gloo by default, NCCL possible."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from isthmus.core.types import Peers, UserError
from isthmus.transport.base import Replica, Static, TransportLimits
from isthmus.transport.heartbeat import Heartbeat
from isthmus.transport.identity import check_identities
from isthmus.transport.peers import vote
from isthmus.transport.rendezvous import exchange_cards, find_world, initialise, open_store
from isthmus.transport.watched_group import Backend, GroupPeers, WatchedGroup, keep_for_ever

_JOIN_BUDGETS = 10  # clusters do not start at the same moment: workers wait this many sync budgets for one another
_LINGER_SECONDS = 5.0  # how long a leaving worker that holds the store waits for the others to leave


class TorchDist(Static):
    """All ranks of torch.distributed, one worker each, with equal weights.

    Works under torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and where
    torch.distributed is initialised already; a worker alone needs neither. Collectives run in a process group of
    their own and none takes longer than the sync budget: a worker that died, stopped or was cut off is found by
    its missing heartbeats and named in `PeerLost`. A static world cannot go on then: resume from a checkpoint.

    Args:
        sync_budget_seconds: bound on one collective; all other timeouts follow from it.
        backend: "gloo" runs beside training and stages CUDA tensors through the CPU; "nccl" must not overlap.
        identity: a flat configuration that all workers must share, compared at join.
        expected_workers: how many the configuration speaks of.
    """

    limits = TransportLimits()

    def __init__(
        self,
        sync_budget_seconds: float = 60.0,
        backend: Backend = "gloo",
        identity: dict[str, str] | None = None,
        expected_workers: int | None = None,
    ) -> None:
        self.sync_budget_seconds = sync_budget_seconds
        self.backend = backend
        self.identity = {"isthmus version": version("isthmus"), **(identity or {})}
        self.expected_workers = expected_workers
        self.limits = TransportLimits(safe_to_overlap=backend == "gloo")
        self.rank, self.num_workers = 0, 1
        self._interval = min(1.0, sync_budget_seconds / 20)
        self._group: WatchedGroup | None = None
        self._leaving = threading.Lock()

    def join(self, replica: Replica) -> None:
        """Meet the other workers, compare configurations, connect. In a static world nobody has to catch up.

        Raises:
            UserError: no launcher, a port in use, another number of ranks than expected, workers that differ.
            PeerLost: a worker did not come.
        """
        self.rank, self.num_workers = find_world()
        if self.expected_workers not in (None, self.num_workers):
            ranks = f"{self.num_workers} rank{'s' if self.num_workers > 1 else ''}"
            raise UserError(f"the configuration says {self.expected_workers} workers, but {ranks} started")
        if self.num_workers == 1 or self._group is not None:
            return
        if not dist.is_initialized():
            initialise(self.backend, _JOIN_BUDGETS * self.sync_budget_seconds)
        atexit.register(self.leave)
        try:
            self._meet()
        except BaseException:
            self.leave()
            raise

    def quorum(self, outer_step: int, claim: Any = None) -> Peers:
        """All ranks, always."""
        weights = [1 / self.num_workers] * self.num_workers
        device = "cpu" if self.backend == "gloo" else "cuda"
        return GroupPeers(self._group, self.rank, weights, f"sync {outer_step}", device)

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote; see `Transport.commit`."""
        return vote(peers, ok, fingerprint)

    def leave(self) -> None:
        """Say goodbye and disconnect. A second call does nothing; torch.distributed itself stays initialised."""
        with self._leaving:
            group, self._group = self._group, None
            if group is not None:
                group.close(dist.destroy_process_group, _LINGER_SECONDS)

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def wait_until(self, seconds: float) -> None:
        """Nothing to do: real time passes by itself."""

    def _meet(self) -> None:
        store, store_rank = open_store()
        heartbeat = Heartbeat(store, self.rank, self.num_workers, store_rank, self._interval)
        patience_seconds = min(30.0, self.sync_budget_seconds / 3)
        self._group = WatchedGroup(heartbeat, self.sync_budget_seconds, patience_seconds, self.backend, keep_for_ever)
        join_seconds = _JOIN_BUDGETS * self.sync_budget_seconds
        cards = exchange_cards(store, self.rank, self.num_workers, self.identity, join_seconds)
        heartbeat.start([f"worker {rank} (host {card.host})" for rank, card in enumerate(cards)])
        check_identities([card.identity for card in cards])
        # twice the budget: `run` watches the time itself, and knows better than the backend whom to blame
        timeout = timedelta(seconds=2 * self.sync_budget_seconds)
        self._group.connect(lambda: dist.new_group(timeout=timeout, backend=self.backend))
