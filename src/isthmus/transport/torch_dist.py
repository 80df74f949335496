"""A static world over torch.distributed: gloo by default, NCCL possible."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from isthmus.core.types import Peers
from isthmus.transport.address import check_port, is_loopback, resolve
from isthmus.transport.base import ElasticPart, Replica, TransportError, TransportLimits
from isthmus.transport.configured import ConfiguredTransport, Finding
from isthmus.transport.group_peers import GroupPeers
from isthmus.transport.heartbeat import Heartbeat
from isthmus.transport.peers import vote
from isthmus.transport.rendezvous import RankLayout, exchange_rank_info, find_world, initialise, open_store
from isthmus.transport.shared_config import check_shared_configs
from isthmus.transport.watched_group import NOT_JOINED, Backend, WatchedGroup
from isthmus.transport.worker_group import SINGLE_RANK, GlooWorkerGroup

JOIN_BUDGETS = 10  # clusters do not start at the same moment: workers wait this many sync budgets for one another
_WORKER_BUDGETS = 10  # a rank may wait for others of its worker, whose messages take them several collectives
LINGER_SECONDS = 5.0  # how long a leaving worker that holds the store waits for the others to leave


class TorchDist(ConfiguredTransport):
    """All ranks of torch.distributed, as many to a worker as there should be; workers have equal weights.

    Rank r of the world belongs to worker r // ranks_per_worker. It averages with the ranks of the other workers that
    stand where it stands in its own, and hold the same part of the model. Reports and votes are gathered inside a
    worker before its ranks send them to their peers, so all ranks of all workers decide alike.

    Works under torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and where
    torch.distributed is initialised already; a worker alone needs neither. Collectives run in a process group of
    their own and none takes longer than the sync budget: a worker that died, stopped or was cut off is found by
    its missing heartbeats and named in `PeerLost`. A static world cannot go on then: resume from a checkpoint.

    Args:
        sync_budget_seconds: bound on one collective; all other timeouts follow from it.
        backend: "gloo" runs beside training and stages CUDA tensors through the CPU; "nccl" must not overlap.
        shared_config: a flat configuration that all workers must share, compared at join.
        expected_workers: how many the configuration speaks of.
        ranks_per_worker: one, or as many as the mesh of a worker has.
    """

    elastic: ElasticPart | None = None

    def __init__(
        self,
        sync_budget_seconds: float = 60.0,
        backend: Backend = "gloo",
        shared_config: dict[str, str] | None = None,
        expected_workers: int | None = None,
        ranks_per_worker: int = 1,
    ) -> None:
        self.sync_budget_seconds = sync_budget_seconds
        self.backend = backend
        self.shared_config = {
            "isthmus version": version("isthmus"),
            "ranks per worker": str(ranks_per_worker),
            **(shared_config or {}),
        }
        self.expected_workers = expected_workers
        self.ranks_per_worker = ranks_per_worker
        self.limits = TransportLimits(safe_to_overlap=backend == "gloo", ranks_per_worker=ranks_per_worker)
        self.rank, self.num_workers = 0, 1
        self._interval = min(1.0, sync_budget_seconds / 20)
        self._group: WatchedGroup | None = None  # of the peers
        self.worker_group = SINGLE_RANK
        self._leaving = threading.Lock()

    @override
    @classmethod
    def check(cls, options: Mapping[str, Any]) -> Iterator[Finding]:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            yield Finding("ok", "none is needed: one worker")  # or a launcher that says too little: joining tells
            return
        address, port = resolve(os.environ["MASTER_ADDR"], "correct MASTER_ADDR"), int(os.environ["MASTER_PORT"])
        if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            check_port(port)
        yield Finding("ok", f"worker-0 is at {address}, port {port}")
        own, chosen = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
        if not chosen and is_loopback(resolve(own)) and not is_loopback(address):
            found = f"{own} is {resolve(own)}: gloo would listen where no other machine can reach it"
            how = "set GLOO_SOCKET_IFNAME to the interface that the others reach, or correct /etc/hosts"
            yield Finding("warn", found, how)

    def join(self, replica: Replica) -> None:
        """Find the other workers, compare configurations, connect; in a static world nobody has to catch up.

        Raises:
            UserError: no launcher, a port in use, another number of ranks than expected, workers that differ.
            PeerLost: a rank did not come.
        """
        rank, size = find_world()
        layout = RankLayout(size, self.ranks_per_worker)
        layout.check(self.expected_workers)
        self.rank, self.num_workers = rank // self.ranks_per_worker, size // self.ranks_per_worker
        if size == 1 or self._group is not None:
            return
        initialise(self.backend, JOIN_BUDGETS * self.sync_budget_seconds, layout.name(rank))
        atexit.register(self.leave)
        try:
            self._connect(rank, layout)
        except BaseException:
            self.leave()
            raise

    def quorum(self, outer_step: int, proposal: Any = None) -> Peers:
        """Return all workers, always."""
        if self.worker_group.size < self.ranks_per_worker:
            raise TransportError(f"sync {outer_step}: {NOT_JOINED}")
        weights = [1 / self.num_workers] * self.num_workers
        device = "cpu" if self.backend == "gloo" else "cuda"
        return GroupPeers(self._group, self.rank, weights, f"sync {outer_step}", device, self.worker_group)

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote, and return whether all agreed; see `Transport.commit`."""
        return vote(peers, ok, fingerprint)

    def leave(self) -> None:
        """Disconnect. A second call does nothing; torch.distributed itself stays initialised."""
        with self._leaving:
            group, self._group = self._group, None
            self.worker_group.close()
            if group is not None:
                group.close(LINGER_SECONDS)

    def _connect(self, rank: int, layout: RankLayout) -> None:
        store, store_rank = open_store()
        budget_seconds = self.sync_budget_seconds
        heartbeat = Heartbeat(store, rank, layout.size, store_rank, self._interval)
        watch = partial(WatchedGroup, heartbeat, patience_seconds=min(30.0, budget_seconds / 3))
        self._group = watch(budget_seconds, backend=self.backend, members=layout.peers_of(rank))
        infos = exchange_rank_info(store, rank, layout, self.shared_config, JOIN_BUDGETS * budget_seconds)
        heartbeat.start([layout.name(r, host) for r, (host, _) in enumerate(infos)])
        names = [layout.name(r) for r in range(layout.size)] if layout.per_worker > 1 else None
        check_shared_configs([shared_config for _, shared_config in infos], names)
        everybodys_peers = [layout.peers_of(r) for r in range(layout.per_worker)]
        self._group.connect(partial(make_own_group, everybodys_peers, rank, self.backend, budget_seconds))
        if layout.per_worker > 1:
            worker_seconds = _WORKER_BUDGETS * budget_seconds
            group = watch(worker_seconds, members=layout.of_worker(rank), kind="worker")
            workers = [layout.of_worker(r) for r in range(0, layout.size, layout.per_worker)]
            group.connect(partial(make_own_group, workers, rank, "gloo", worker_seconds))
            self.worker_group = GlooWorkerGroup(rank % layout.per_worker, layout.per_worker, group, group.disconnect)


def make_own_group(groups: list[range], rank: int, backend: Backend, budget_seconds: float) -> dist.ProcessGroup:
    """Return the group of this rank; torch names groups by counting, so all ranks make all of them, in one order."""
    # twice the budget: `WatchedGroup` watches the time itself, and knows better than the backend whom to blame
    timeout = timedelta(seconds=2 * budget_seconds)
    made = [dist.new_group(list(members), timeout=timeout, backend=backend) for members in groups]
    own: dist.ProcessGroup = made[next(i for i, members in enumerate(groups) if rank in members)]
    return own
