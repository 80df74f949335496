"""An elastic world: workers come, die and return, and a sync commits for all that are in it or for none."""

from __future__ import annotations

import atexit
from typing import Any

from typing_extensions import override

from isthmus.core.types import Peers, UserError
from isthmus.transport.base import Leaving, Replica, ReplicatedState, TransportLimits
from isthmus.transport.configured import ConfiguredTransport
from isthmus.transport.elastic import rank_consensus
from isthmus.transport.elastic.election import Weighting, weigh, what_lacks
from isthmus.transport.elastic.history import CommitHistory
from isthmus.transport.elastic.member import PAUSE_SECONDS, STATE, ElasticMember
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.elastic.slow_joiners import SlowJoiners
from isthmus.transport.elastic.worker_ranks import connect_worker_group
from isthmus.transport.heal.donor import StateServer
from isthmus.transport.heal.snapshot import Snapshot
from isthmus.transport.link_end import LinkEnd, LinkOptions
from isthmus.transport.link_peers import LinkWorkerGroup
from isthmus.transport.rendezvous import JOIN_BUDGETS
from isthmus.transport.shared_notes import Notes
from isthmus.transport.worker_group import SINGLE_RANK
from isthmus.version import __version__


class ElasticTransport(ConfiguredTransport):
    """Any `Membership` as a transport; the rules are here, the same for all engines.

    At a rendezvous each worker tells how many commits its state holds (version), which they were (chain), which sync
    it asks for. The largest version leads; who is behind catches up with a leader and then takes part once with weight
    0. A vote ends every sync: all members commit, or none does, and then its pseudo-gradients ride in the next one.
    A worker that could not see how a vote ended learns it from the infos of the next rendezvous.

    Args:
        membership: finds the workers.
        shared_config: a flat configuration that all workers must share.
        expected_workers: how many a new run waits for before its first sync; None: `min_workers`.
        min_workers: with fewer that are up to date nobody commits: they wait, and keep their progress. None: more than
            half of `expected_workers`, and of those who made the last commit, so that the parts of a cut network cannot
            both go on; with a number below the majority they can.
        weighting: each worker's share in the mean.
        sync_budget_seconds: bound on one attempt at a sync; all other timeouts follow from it.
        link_options: of this worker's end of the link.
        towards: a host on the way to the others.
        replicated_state: what moves with the commits.
        resumes: this worker has a checkpoint to go on from. It waits for `expected_workers` no longer than one attempt
            at a sync may take.
        ranks_per_worker: all of them are in this world. The first comes to the rendezvous; what follows from the infos
            that it was told each works out for itself, and syncs with those who hold the same part of the model.
    """

    limits = TransportLimits(elastic=True)  # of a worker of one rank

    def __init__(
        self,
        membership: Membership,
        shared_config: dict[str, str] | None = None,
        expected_workers: int | None = None,
        min_workers: int | None = None,
        weighting: Weighting = "uniform",
        sync_budget_seconds: float = 60.0,
        link_options: LinkOptions = LinkOptions(host="127.0.0.1"),  # noqa: B008 (a frozen value)
        towards: str = "127.0.0.1",
        replicated_state: ReplicatedState | None = None,
        ranks_per_worker: int = 1,
        resumes: bool = False,
    ) -> None:
        needs_majority = min_workers is None
        min_workers = (expected_workers or 1) // 2 + 1 if min_workers is None else min_workers
        if expected_workers is not None and min_workers > expected_workers:
            raise UserError(
                f"min_workers is {min_workers}, but the run has {expected_workers} workers: no sync could ever commit"
            )
        self.membership, self.min_workers, self.weighting = membership, min_workers, weighting
        self.limits = TransportLimits(elastic=True, ranks_per_worker=ranks_per_worker)
        self.sync_budget_seconds = sync_budget_seconds
        self._link_options, self._towards = link_options, towards
        self._link: LinkEnd | None = None
        self.num_workers = expected_workers or min_workers
        ranks = {"ranks per worker": str(ranks_per_worker)}
        shared_config = {"isthmus version": __version__, **ranks, **(shared_config or {})}
        history = CommitHistory(replicated_state)
        self.elastic = ElasticMember(
            membership,
            history,
            shared_config,
            min_workers,
            needs_majority,
            self.num_workers,
            sync_budget_seconds,
            start_seconds=sync_budget_seconds * (1 if resumes else JOIN_BUDGETS),
        )
        self.worker_group = SINGLE_RANK
        self._slow_joiners = SlowJoiners(JOIN_BUDGETS * sync_budget_seconds)
        self._server: StateServer | None = None
        self._outer_step = 0
        self._rendezvous: Rendezvous | None = None
        self._names: list[str] = []  # of the workers in the present sync
        self._logged_problem = ""

    def join(self, replica: Replica) -> None:
        """Connect, and serve this worker's state to whoever has to catch up."""

        def provide(wait_seconds: float) -> Snapshot:
            state = replica.shared_state(wait_seconds)
            decided, finished = state["elastic_decided"], state["elastic"]["version"]
            return Snapshot(f"{decided['version']}-{decided['chain']}-{finished}-{state['inner_steps']}", state)

        seconds = self.sync_budget_seconds
        self.worker_group = connect_worker_group(self.limits.ranks_per_worker, seconds, self._link_options)
        self._server = StateServer(provide, lambda: self.elastic.position, provide_seconds=2 * seconds)
        options = self._link_options.of_rank(self.worker_group.rank)
        self._link = LinkEnd(options, self._towards, min(0.5, seconds / 20), min(8.0, seconds / 7.5))
        self._link.serve(STATE, self._server.serve)
        atexit.register(self.leave)
        self.elastic.connect(self.worker_group, self._link)

    def quorum(self, outer_step: int, proposal: Any = None) -> Peers:
        """Find the others, and wait while they are too few; see `Transport.quorum`."""
        member, self._outer_step = self.elastic, outer_step
        assert self._server is not None, "join comes first"
        self._slow_joiners.wait(self._server.is_serving, member.leaving)
        member.ask_for(outer_step, proposal)
        while not member.is_leaving():
            found = member.rendezvous()
            names = member.up_to_date(found)
            self._slow_joiners.note(found.members, names)
            lacks = what_lacks(found.members, names)
            if not lacks:
                self._rendezvous, self._names, self._logged_problem = found, names, ""
                self.num_workers = len(names)
                weights = self._weigh(found, names)
                return rank_consensus.connect_peers(member.worker_group, member.peer_group, found, names, weights)
            problem = f"waiting: {lacks}"
            if problem != self._logged_problem:
                member.log(problem)
                self._logged_problem = problem
            member.leaving.wait(PAUSE_SECONDS)
        raise Leaving(self._logged_problem or "this worker is leaving")

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote; a worker whose anchors differ from the majority's has to catch up, and nobody commits.

        Where this worker could not see how the vote ended, a `TransportError` says so, and the next quorum tells.
        """
        member, history, found = self.elastic, self.elastic.history, self._rendezvous
        assert found is not None and self._server is not None, "quorum comes first"  # noqa: PT018
        result = rank_consensus.vote_as_one(member.worker_group, peers, ok, history.fingerprint(fingerprint))
        if result.drift:
            member.log(result.drift)
        if result.drifted:
            history.mark_drifted()
        if result.committed:
            history.append(self._outer_step, found, self._names, peers.weights)
            member.note_commit(found, self._names)
            self._slow_joiners.start()
        return result.committed

    @override
    def open_notes(self) -> Notes:
        """Open what the ranks of this worker tell one another."""
        assert isinstance(self.worker_group, LinkWorkerGroup), "a worker of one rank has nobody to tell"
        return self.worker_group.notes

    def leave(self) -> None:
        """Disconnect; a wait for others, or a transfer of the state, ends at once. A second call does nothing."""
        atexit.unregister(self.leave)
        self.elastic.interrupt()
        if self._server is not None:
            self._server.close()
        self.membership.leave()
        if self._link is not None:
            self._link.close()
        self.worker_group.close()

    def _weigh(self, found: Rendezvous, names: list[str]) -> list[float]:
        """Return shares by rule; 0 for a worker whose proposal cannot be committed, as long as there are others."""
        members = {name: found.members[name] | {"samples": 1} for name in names}
        moved = self.elastic.history.moved_by({name: members[name]["proposal"] for name in names})
        if moved is not None:
            for name in names:
                reason = moved.check(name, members[name]["proposal"])
                if reason:
                    self.elastic.log(f"{name} is left out of sync {self._outer_step}: {reason}")
                    members[name]["healed"] = True
                else:
                    members[name]["samples"] = moved.gain(name, members[name]["proposal"])
        return weigh(members, names, self.weighting)
