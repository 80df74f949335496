"""An elastic world: workers come, die and return, and a sync commits for all that are in it or for none."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from isthmus.core.types import Peers, State, UserError, WorkerGroup
from isthmus.transport.base import (
    Behind,
    ElasticPart,
    Leaving,
    RankLost,
    Replica,
    ReplicatedState,
    TransportError,
    TransportLimits,
)
from isthmus.transport.configured import ConfiguredTransport
from isthmus.transport.elastic.election import Weighting, leaders, link, weigh, with_replicated_state
from isthmus.transport.elastic.hold import Hold
from isthmus.transport.elastic.membership import Card, Meeting, Membership
from isthmus.transport.elastic.ranks import join_ranks
from isthmus.transport.elastic.together import fetch_parts, gather_around, meet, vote
from isthmus.transport.heal.donor import StateServer
from isthmus.transport.heal.snapshot import Snapshot
from isthmus.transport.shared_config import check_shared_configs
from isthmus.transport.single_rank import SINGLE_RANK

_JOIN_BUDGETS = 10  # clusters do not start at the same moment: a new run waits this long for all its workers
_SLOWEST_LINK = 1e6  # bytes a second: a state that arrives more slowly is given up
_PAUSE_SECONDS = 0.2  # before looking again for workers that are missing
Say = Callable[[str], None]


class Elastic(ConfiguredTransport):
    """Any `Membership` as a transport; the rules are here, the same for all engines.

    Whoever meets shows a card: how many commits its state holds (version), which they were (chain), which sync it
    asks for. The largest version leads; who is behind catches up with a leader and then takes part once with weight
    0. A vote ends every sync: all members commit, or none does, and then its pseudo-gradients ride in the next one.
    A worker that could not see how a vote ended learns it from the cards of the next meeting.

    Args:
        membership: finds the workers and connects them.
        shared_config: a flat configuration that all workers must share.
        expected_workers: how many a new run waits for before its first sync; None: `min_workers`.
        min_workers: with fewer that are up to date nobody commits: they wait, and keep their progress. None: more than
            half of `expected_workers`.
        weighting: each worker's share in the mean.
        sync_budget_seconds: bound on one attempt at a sync.
        state_host: address under which the others can fetch this worker's state.
        say: where a line goes that a person should read.
        replicated_state: what moves with the commits.
        ranks_per_worker: all of them are in this world. The first meets the other workers; what follows from the cards
            that it was shown each works out for itself, and syncs with those who hold the same part of the model.
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
        state_host: str = "127.0.0.1",
        say: Say = print,
        replicated_state: ReplicatedState | None = None,
        ranks_per_worker: int = 1,
    ) -> None:
        min_workers = (expected_workers or 1) // 2 + 1 if min_workers is None else min_workers
        if expected_workers is not None and min_workers > expected_workers:
            raise UserError(
                f"min_workers is {min_workers}, but the run has {expected_workers} workers: no sync could ever commit"
            )
        self.membership, self.min_workers, self.weighting = membership, min_workers, weighting
        self.limits = TransportLimits(elastic=True, ranks_per_worker=ranks_per_worker)
        self.worker_group: WorkerGroup = SINGLE_RANK
        ranks = {"ranks per worker": str(ranks_per_worker)}
        self.shared_config = {"isthmus version": version("isthmus"), **ranks, **(shared_config or {})}
        self.expected_workers = expected_workers or min_workers
        self.sync_budget_seconds = sync_budget_seconds
        self.num_workers = self.expected_workers
        self._speed = 0.0  # inner steps a second
        self._speeds = dict[str, float]()  # of all members, at the last commit
        self.healed = False
        self._download_seconds = self._adopt_seconds = 0.0  # of catching up, until this worker takes part in a commit
        self._downloaded_at = 0.0
        self._hold = Hold(_JOIN_BUDGETS * sync_budget_seconds, say)
        self.replicated_state = replicated_state
        self._proposal: Any = None
        self._server: StateServer | None = None
        self._addresses: list[str] = []  # where each of this worker's ranks serves its part of the state
        self.state_host, self._token, self._say = state_host, _token(shared_config), say
        self._version, self._chain = 0, "new"
        self._contributed: dict[str, int] = {}  # worker: the last sync that its pseudo-gradient was in
        self._outer_step = 0
        self._meeting: Meeting | None = None
        self._members: list[str] = []
        self._donors: list[str] = []  # their ranks at the same place as this one
        self._seen: set[str] = set()  # who was at the last meeting
        self._leaving = threading.Event()
        self._waits_for = ""

    @property
    def elastic(self) -> ElasticPart:
        """This world itself."""
        return self

    def join(self, replica: Replica) -> None:
        """Connect, and serve this worker's state to whoever has to catch up."""

        def provide(wait_seconds: float) -> Snapshot:
            state = replica.shared_state(wait_seconds)
            decided, finished = state["elastic_decided"], state["elastic"]["version"]
            return Snapshot(f"{decided['version']}-{decided['chain']}-{finished}-{state['inner_steps']}", state)

        self.worker_group = join_ranks(self.limits.ranks_per_worker, self.sync_budget_seconds)
        if self.worker_group.rank > 0:
            self._say = _nothing  # the first rank has said it
        self.membership.connect()
        self._server = StateServer(
            self.state_host, 0, self._token, provide, provide_seconds=2 * self.sync_budget_seconds
        )
        self._addresses = self.worker_group.all_gather_object(self._server.address)
        self._deadline = time.monotonic() + _JOIN_BUDGETS * self.sync_budget_seconds

    def quorum(self, outer_step: int, proposal: Any = None) -> Peers:
        """Meet the others; wait while there are too few.

        Raises:
            Behind: the others have committed without this worker.
            RankLost: a rank of this worker is gone.
            TransportError: the engine failed, or this worker leaves.
        """
        self._outer_step, self._proposal = outer_step, proposal
        assert self._server is not None
        self._hold.wait(self._server.is_serving, self._leaving)
        if self._download_seconds and not self._adopt_seconds:
            self._adopt_seconds = time.monotonic() - self._downloaded_at
        while not self._is_leaving():
            meeting = meet(self.worker_group, self.membership, self._card(), self.sync_budget_seconds)
            self._seen = set(meeting.cards)
            names = self._up_to_date(meeting)
            self._hold.look(meeting.cards, names)
            missing = self._missing(meeting, names)
            if not missing:
                self._meeting, self._members, self._waits_for = meeting, names, ""
                self.num_workers = len(names)
                weights = self._weigh(meeting, names)
                return gather_around(self.worker_group, self.membership, meeting, names, weights)
            if missing != self._waits_for:
                self._say(f"{self.membership.name}: {missing}")
                self._waits_for = missing
            self._leaving.wait(_PAUSE_SECONDS)
        raise Leaving("this worker is leaving")

    def commit(self, peers: Peers, ok: bool, fingerprint: bytes = b"") -> bool:
        """Vote; a worker whose anchors differ from the majority's has to catch up, and nobody commits.

        Raises:
            TransportError: this worker could not see how the vote ended; the next quorum tells.
        """
        meeting = self._meeting
        assert meeting is not None
        end = vote(self.worker_group, peers, ok, with_replicated_state(fingerprint, self.replicated_state))
        if end.drift:
            self._say(f"{self.membership.name}: {end.drift}")
            self._chain = "drifted" if end.drifted else self._chain
        if end.committed:
            self._chain = link(self._chain, self._outer_step, meeting.id, self._members)
            self._version += 1
            assert self._server is not None
            self._server.renew()
            self._hold.begin()
            weighted = [name for name, weight in zip(self._members, peers.weights, strict=True) if weight > 0]
            self._contributed |= dict.fromkeys(weighted, self._outer_step)
            self._speeds = {name: meeting.cards[name]["speed"] for name in self._members}
            self.healed, self._download_seconds = False, 0.0
            replicated_state = self._moved_state(meeting, self._members)
            if replicated_state is not None:
                replicated_state.commit({name: meeting.cards[name]["proposal"] for name in self._members}, weighted)
        return end.committed

    def report_speed(self, steps_per_second: float) -> None:
        """Put the speed on the next card."""
        self._speed = steps_per_second

    @property
    def relative_speed(self) -> float:
        """This worker's share of the fastest one's speed, by the cards of the last commit."""
        own, fastest = self._speeds.get(self.membership.name, 0.0), max(self._speeds.values(), default=0.0)
        return own / fastest if own > 0 else 1.0

    def catch_up(self, max_bytes: int) -> State:
        """The run's state, from those who are ahead; to be called on the communication thread after `Behind`."""
        begin = time.monotonic()
        while not self._is_leaving():
            state, problem = fetch_parts(
                self.worker_group,
                self._donors,
                token=self._token,
                progress_seconds=max(2.0, self.sync_budget_seconds / 3),
                total_seconds=_JOIN_BUDGETS * self.sync_budget_seconds + max_bytes / _SLOWEST_LINK,
                max_bytes=max_bytes,
            )
            if state is not None:
                self.healed, self._downloaded_at, self._adopt_seconds = True, time.monotonic(), 0.0
                self._download_seconds = self._downloaded_at - begin
                return state
            self._say(f"{self.membership.name}: cannot catch up yet: {problem}")
            meeting = meet(self.worker_group, self.membership, self._card(), self.sync_budget_seconds)
            self._up_to_date(meeting, look_only=True)
            self._leaving.wait(_PAUSE_SECONDS)
        raise Leaving("this worker is leaving")

    def contributed_to(self, outer_step: int) -> bool:
        """Whether the run's state holds what this worker sent in that sync."""
        return self._contributed.get(self.membership.name, -1) >= outer_step

    def state_dict(self) -> State:
        """What moves with every commit."""
        replicated = (
            {"replicated_state": self.replicated_state.state_dict()} if self.replicated_state is not None else {}
        )
        return {"version": self._version, "chain": self._chain, "contributed": dict(self._contributed), **replicated}

    def load_state_dict(self, state_dict: State) -> None:
        """Stand where a saved or fetched state stands."""
        self._version, self._chain = state_dict["version"], state_dict["chain"]
        self._contributed = dict(state_dict["contributed"])
        if self.replicated_state is not None:
            self.replicated_state.load_state_dict(state_dict["replicated_state"])

    def leave(self) -> None:
        """Say goodbye."""
        self._leaving.set()
        if self._server is not None:
            self._server.close()
        self.membership.leave()
        self.worker_group.close()

    def wait_for_the_others(self) -> None:
        """At the end of the run: stay until the others have come to it too, for those who must catch up to do so."""
        if self.worker_group.rank == 0:
            self._await_the_end()
        with suppress(RankLost):
            self.worker_group.all_gather_object("may go")

    def _await_the_end(self) -> None:
        end, done = time.monotonic() + self.sync_budget_seconds / 2, {self.membership.name}
        while not self._seen <= done and time.monotonic() < end and not self._leaving.is_set():
            try:
                card = self._card() | {"finished": True, "contacts": []}
                meeting = self.membership.meet(card, end - time.monotonic())
            except TransportError:
                return
            done = {name for name, card in meeting.cards.items() if card["finished"]}
            self._seen = self._seen & meeting.cards.keys()

    def interrupt(self) -> None:
        """End a wait for others, from any thread."""
        self._leaving.set()

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def wait_until(self, seconds: float) -> None:
        """Nothing to do: real time passes by itself."""

    def _is_leaving(self) -> bool:
        """Whether any rank of this worker has been told to."""
        return any(self.worker_group.all_gather_object(self._leaving.is_set()))

    def _card(self) -> Card:
        new = self._version == 0 and time.monotonic() < self._deadline
        return {
            "shared_config": self.shared_config,
            "version": self._version,
            "chain": self._chain,
            "outer_step": self._outer_step,
            "needs": max(self.min_workers, self.expected_workers if new else 0),
            "addresses": self._addresses,
            "healed": self.healed,
            "proposal": self._proposal,
            "finished": False,
            "speed": self._speed,
            "download_seconds": self._download_seconds,
            "adopt_seconds": self._adopt_seconds,
            "samples_per_step": self.replicated_state.samples_per_step if self.replicated_state is not None else 1,
        }

    def _up_to_date(self, meeting: Meeting, look_only: bool = False) -> list[str]:
        """The workers that lead, if this is one of them."""
        own = self.membership.name
        names = leaders(meeting.cards)
        reference = meeting.cards[names[0]]["shared_config"]
        if own not in names or look_only:
            check_shared_configs([reference, self.shared_config], [names[0], own])
            self._donors = [meeting.cards[name]["addresses"][self.worker_group.rank] for name in names]
        if own not in names and not look_only:
            raise Behind(f"{', '.join(names)} are at version {meeting.cards[names[0]]['version']}")
        return [name for name in names if meeting.cards[name]["shared_config"] == self.shared_config]

    def _weigh(self, meeting: Meeting, names: list[str]) -> list[float]:
        """Shares by rule; nothing for a worker whose proposal cannot be committed, as long as there are others."""
        cards = {name: meeting.cards[name] | {"samples": 1} for name in names}
        replicated_state = self._moved_state(meeting, names)
        if replicated_state is not None:
            for name in names:
                reason = replicated_state.check(name, cards[name]["proposal"])
                if reason:
                    self._say(f"left out of sync {self._outer_step}: {reason}")
                    cards[name]["healed"] = True
                else:
                    cards[name]["samples"] = replicated_state.gain(name, cards[name]["proposal"])
        return weigh(cards, names, self.weighting)

    def _moved_state(self, meeting: Meeting, names: list[str]) -> ReplicatedState | None:
        """Return the replicated state if this sync moves it; a worker that has just caught up proposes nothing."""
        return self.replicated_state if any(meeting.cards[name]["proposal"] is not None for name in names) else None

    def _missing(self, meeting: Meeting, names: list[str]) -> str:
        """Why these cannot sync yet; empty when they can."""
        needed = meeting.cards[self.membership.name]["needs"]
        if len(names) >= needed:
            return ""
        return f"waiting: {len(names)} of at least {needed} workers are here ({', '.join(names)})"


def _token(shared_config: dict[str, str] | None) -> str:
    """Return what only workers of the same configuration know: no others are handed a state."""
    return hashlib.blake2b(json.dumps(shared_config, sort_keys=True).encode(), digest_size=16).hexdigest()


def _nothing(line: str) -> None:
    """Not said."""
