"""One worker as a member of an elastic world: what it tells the others, how it catches up, how it waits at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from contextlib import suppress
from typing import Any

from typing_extensions import override

from isthmus.core.types import State, WorkerGroup
from isthmus.transport.base import Behind, ElasticPart, Leaving, RankLost, TransportError
from isthmus.transport.elastic import rank_consensus
from isthmus.transport.elastic.election import leaders
from isthmus.transport.elastic.history import CommitHistory
from isthmus.transport.elastic.membership import MemberInfo, Membership, Rendezvous
from isthmus.transport.shared_config import check_shared_configs
from isthmus.transport.worker_group import SINGLE_RANK

_LOGGER = logging.getLogger(__name__)
JOIN_BUDGETS = 10  # clusters do not start at the same moment: a new run waits this long for all its workers
PAUSE_SECONDS = 0.2  # before looking again for workers that are missing
_MIN_STATE_BYTES_PER_SECOND = 1e6  # a state that arrives more slowly is given up


class ElasticMember(ElasticPart):
    """A worker among others that come and go; see `ElasticPart` for what the outer loop asks of it.

    With fewer than `min_workers` nobody commits; a new run waits for `expected_workers`. Only who has the flat
    `shared_config` is handed a state.
    """

    def __init__(
        self,
        membership: Membership,
        history: CommitHistory,
        shared_config: dict[str, str],
        min_workers: int,
        expected_workers: int,
        sync_budget_seconds: float,
    ) -> None:
        self.membership, self.history, self.shared_config = membership, history, shared_config
        self.min_workers, self.expected_workers = min_workers, expected_workers
        self.sync_budget_seconds = sync_budget_seconds
        self.token = hashlib.blake2b(json.dumps(shared_config, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.worker_group = SINGLE_RANK
        self.leaving = threading.Event()
        self.replicated_state, self.state_addresses = history.replicated_state, []
        self._start_deadline = 0.0  # until then a new run waits for all its workers
        self._outer_step, self._proposal = 0, None  # of the sync that this worker asks for
        self._speed = 0.0  # inner steps a second
        self._speeds = dict[str, float]()  # of all members, at the last commit
        self._donors: list[str] = []  # addresses where the state of those ahead is served to this rank
        self._present: set[str] = set()  # who was at the last rendezvous
        self._healed = False  # this worker has caught up, and has been in no commit since
        self._download_seconds = self._adopt_seconds = 0.0  # of catching up, until this worker takes part in a commit
        self._downloaded_at = 0.0

    def connect(self, worker_group: WorkerGroup, state_address: str) -> None:
        """Begin to take part with these connected ranks, of which this one serves its part of the state there."""
        self.worker_group = worker_group
        self.state_addresses = worker_group.all_gather_object(state_address)
        self._start_deadline = time.monotonic() + JOIN_BUDGETS * self.sync_budget_seconds

    def ask_for(self, outer_step: int, proposal: Any) -> None:
        """Set the sync that this worker asks for at its next rendezvous, and what it wants committed with it."""
        self._outer_step, self._proposal = outer_step, proposal
        if self._download_seconds and not self._adopt_seconds:
            self._adopt_seconds = time.monotonic() - self._downloaded_at

    def rendezvous(self) -> Rendezvous:
        """Tell the others this worker's info, and return everybody's."""
        found = rank_consensus.rendezvous(self.worker_group, self.membership, self._info(), self.sync_budget_seconds)
        self._present = set(found.members)
        return found

    def up_to_date(self, found: Rendezvous) -> list[str]:
        """Return the workers that lead, this one among them, or raise `Behind`: it has to catch up with them first."""
        names = leaders(found.members)
        if self.membership.name not in names:
            self._choose_donors(found, names)
            raise Behind(
                f"this worker has to catch up: {', '.join(names)} are at version {found.members[names[0]]['version']}"
            )
        return [name for name in names if found.members[name]["shared_config"] == self.shared_config]

    def note_commit(self, found: Rendezvous, names: list[str]) -> None:
        """Take note of a commit in which this worker took part."""
        self._speeds = {name: found.members[name]["speed"] for name in names}
        self._healed, self._download_seconds = False, 0.0

    def is_leaving(self) -> bool:
        """Return whether any rank of this worker has been told to leave."""
        return any(self.worker_group.all_gather_object(self.leaving.is_set()))

    def log(self, message: str) -> None:
        """Log a line about this worker, once for all of its ranks."""
        if self.worker_group.rank == 0:
            _LOGGER.info("%s: %s", self.membership.name, message)

    @property
    @override
    def relative_speed(self) -> float:
        own, fastest = self._speeds.get(self.membership.name, 0.0), max(self._speeds.values(), default=0.0)
        return own / fastest if own > 0 else 1.0

    @override
    def report_speed(self, steps_per_second: float) -> None:
        self._speed = steps_per_second

    @override
    def catch_up(self, max_bytes: int) -> State:
        start = time.monotonic()
        while not self.is_leaving():
            state, problem = rank_consensus.fetch_state(
                self.worker_group,
                self._donors,
                token=self.token,
                progress_seconds=max(2.0, self.sync_budget_seconds / 3),
                total_seconds=JOIN_BUDGETS * self.sync_budget_seconds + max_bytes / _MIN_STATE_BYTES_PER_SECOND,
                max_bytes=max_bytes,
            )
            if state is not None:
                self._healed, self._downloaded_at, self._adopt_seconds = True, time.monotonic(), 0.0
                self._download_seconds = self._downloaded_at - start
                return state
            self.log(f"cannot catch up yet: {problem}")
            found = self.rendezvous()
            self._choose_donors(found, leaders(found.members))
            self.leaving.wait(PAUSE_SECONDS)
        raise Leaving("this worker is leaving")

    @override
    def contributed_to(self, outer_step: int) -> bool:
        return self.history.holds(self.membership.name, outer_step)

    @override
    def wait_for_the_others(self) -> None:
        if self.worker_group.rank == 0:
            self._wait_until_all_have_finished()
        with suppress(RankLost):
            self.worker_group.all_gather_object("all have finished")

    @override
    def interrupt(self) -> None:
        self.leaving.set()

    @override
    def state_dict(self) -> State:
        return self.history.state_dict()

    @override
    def load_state_dict(self, state_dict: State) -> None:
        self.history.load_state_dict(state_dict)

    def _info(self) -> MemberInfo:
        history, replicated_state = self.history, self.replicated_state
        is_new_run = history.version == 0 and time.monotonic() < self._start_deadline
        return {
            "shared_config": self.shared_config,
            "version": history.version,
            "chain": history.chain,
            "outer_step": self._outer_step,
            "needed_workers": max(self.min_workers, self.expected_workers if is_new_run else 0),
            "addresses": self.state_addresses,
            "healed": self._healed,
            "proposal": self._proposal,
            "finished": False,
            "speed": self._speed,
            "download_seconds": self._download_seconds,
            "adopt_seconds": self._adopt_seconds,
            "samples_per_step": replicated_state.samples_per_step if replicated_state is not None else 1,
        }

    def _choose_donors(self, found: Rendezvous, names: list[str]) -> None:
        reference = found.members[names[0]]["shared_config"]
        check_shared_configs([reference, self.shared_config], [names[0], self.membership.name])
        self._donors = [found.members[name]["addresses"][self.worker_group.rank] for name in names]

    def _wait_until_all_have_finished(self) -> None:
        end, finished = time.monotonic() + self.sync_budget_seconds / 2, {self.membership.name}
        while not self._present <= finished and time.monotonic() < end and not self.leaving.is_set():
            try:
                info = self._info() | {"finished": True, "contacts": []}
                found = self.membership.rendezvous(info, end - time.monotonic())
            except TransportError:
                return
            finished = {name for name, info in found.members.items() if info["finished"]}
            self._present &= found.members.keys()
