"""A static world over torch.distributed: gloo by default, NCCL possible."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from typing_extensions import override

from isthmus.core.types import Peers
from isthmus.link import Group, MemberLost
from isthmus.transport.address import check_port, is_loopback, resolve
from isthmus.transport.base import ElasticPart, PeerLost, Replica, TransportError, TransportLimits
from isthmus.transport.configured import ConfiguredTransport, Finding
from isthmus.transport.link_end import LinkOptions
from isthmus.transport.link_peers import NOT_JOINED, LinkPeers, LinkWorkerGroup
from isthmus.transport.peers import vote
from isthmus.transport.rendezvous import JOIN_BUDGETS, RankLayout, RankLink, find_world, initialise
from isthmus.transport.shared_config import check_shared_configs
from isthmus.transport.shared_notes import Notes, SharedNotes
from isthmus.transport.worker_group import SINGLE_RANK
from isthmus.version import __version__

_WORKER_BUDGETS = 10  # a rank may wait for others of its worker, whose messages take them several collectives


class TorchDist(ConfiguredTransport):
    """All ranks of torch.distributed, as many to a worker as there should be; workers have equal weights.

    Rank r of the world belongs to worker r // ranks_per_worker. It averages with the ranks of the other workers that
    stand where it stands in its own, and hold the same part of the model. Reports and votes are gathered inside a
    worker before its ranks send them to their peers, so all ranks of all workers decide alike.

    Works under torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and where
    torch.distributed is initialised already; a worker alone needs neither. Collectives run over a link of their own,
    whose ends the workers find at torch's store, and none takes longer than the sync budget: a worker that died,
    stopped or was cut off is found by its missing heartbeats and named in `PeerLost`. A static world cannot go on
    then: resume from a checkpoint.

    Args:
        sync_budget_seconds: bound on one collective; all other timeouts follow from it.
        backend: "gloo" or "nccl": of the process groups that a mesh makes inside a worker.
        host, port, announce, identity, trusted, via: see `LinkOptions`.
        shared_config: a flat configuration that all workers must share, compared at join.
        expected_workers: how many the configuration speaks of.
        ranks_per_worker: one, or as many as the mesh of a worker has.
    """

    PRIVATE_OPTIONS = LinkOptions.NAMES

    elastic: ElasticPart | None = None

    def __init__(
        self,
        sync_budget_seconds: float = 60.0,
        backend: Literal["gloo", "nccl"] = "gloo",
        host: str | None = None,
        port: int = 0,
        announce: str | None = None,
        identity: str | None = None,
        trusted: str | None = None,
        via: str | None = None,
        shared_config: dict[str, str] | None = None,
        expected_workers: int | None = None,
        ranks_per_worker: int = 1,
    ) -> None:
        self.sync_budget_seconds = sync_budget_seconds
        self.backend = backend
        self._options = LinkOptions(host, port, announce, identity, trusted, via)
        self.shared_config = {
            "isthmus version": __version__,
            "ranks per worker": str(ranks_per_worker),
            **(shared_config or {}),
        }
        self.expected_workers = expected_workers
        self.ranks_per_worker = ranks_per_worker
        self.limits = TransportLimits(ranks_per_worker=ranks_per_worker)
        self.rank, self.num_workers = 0, 1
        self._link: RankLink | None = None
        self._peers: Group | None = None
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
        if size == 1 or self._link is not None:
            return
        names = [layout.name(r) for r in range(size)]
        initialise(self.backend, JOIN_BUDGETS * self.sync_budget_seconds, names)
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
        return LinkPeers(
            self._peers,
            self.rank,
            [1 / self.num_workers] * self.num_workers,
            f"sync {outer_step}",
            self.sync_budget_seconds,
            self.worker_group,
        )

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote, and return whether all agreed; see `Transport.commit`."""
        return vote(peers, ok, fingerprint)

    @override
    def open_notes(self) -> Notes:
        assert self._peers is not None, "join comes first"
        return SharedNotes(self._peers)

    def leave(self) -> None:
        """Disconnect. A second call does nothing; torch.distributed itself stays initialised."""
        with self._leaving:
            link, self._link, self._peers = self._link, None, None
            if link is not None:
                link.close()

    def _connect(self, rank: int, layout: RankLayout) -> None:
        budget_seconds = self.sync_budget_seconds
        self._link = link = RankLink(budget_seconds, self._options.of_rank(rank % layout.per_worker))
        infos = link.exchange_info(rank, [layout.name(r) for r in range(layout.size)], self.shared_config)
        names = [layout.name(r) for r in range(layout.size)] if layout.per_worker > 1 else None
        check_shared_configs([info.shared_config for info in infos], names)
        members = [info.member(r, layout.name(r, info.host)) for r, info in enumerate(infos)]

        def connect(kind: str, ranks: range) -> Group:
            return link.open(f"{kind} {ranks[0]}", [members[r] for r in ranks], ranks.index(rank), budget_seconds)

        try:
            self._peers = connect("peers of rank", layout.peers_of(rank))
            if layout.per_worker > 1:
                group = connect("worker of rank", layout.of_worker(rank))
                self._peers.bound, group.bound = group, self._peers  # all ranks of all workers end together
                self.worker_group = LinkWorkerGroup(group, _WORKER_BUDGETS * budget_seconds)
        except MemberLost as lost:
            raise PeerLost(lost.ranks, str(lost)) from lost
