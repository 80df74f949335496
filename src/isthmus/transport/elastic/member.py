"""One worker as a member of an elastic world: what it tells the others, how it catches up, how it waits at the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from typing_extensions import override

from isthmus.core.types import State, WorkerGroup
from isthmus.link import Member, MemberLost
from isthmus.transport.base import Behind, ElasticPart, Leaving, RankLost, TransportError
from isthmus.transport.elastic import rank_consensus
from isthmus.transport.elastic.election import leaders, share_of_fastest
from isthmus.transport.elastic.history import CommitHistory
from isthmus.transport.elastic.member_info import MemberInfo, member_of, read_told
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.elastic.peer_group import PeerGroup
from isthmus.transport.elastic.regroup import Regroup
from isthmus.transport.heal.fetch import Dial
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.rendezvous import JOIN_BUDGETS
from isthmus.transport.shared_config import check_shared_configs
from isthmus.transport.worker_group import SINGLE_RANK

_LOGGER = logging.getLogger(__name__)
STATE = "state"  # the service of the link that hands it to those who have to catch up
PAUSE_SECONDS = 0.2  # before looking again for workers that are missing
_MIN_STATE_BYTES_PER_SECOND = 1e6  # a state that arrives more slowly is given up


class ElasticMember(ElasticPart):
    """A worker among others that come and go; see `ElasticPart` for what the outer loop asks of it.

    With fewer than `min_workers` nobody commits, nor, where `needs_majority`, with half or fewer of those who made the
    last commit; who has seen no commit yet waits `start_seconds` for `expected_workers`. Only who has the flat
    `shared_config` is handed a state.
    """

    def __init__(
        self,
        membership: Membership,
        history: CommitHistory,
        shared_config: dict[str, str],
        min_workers: int,
        needs_majority: bool,
        expected_workers: int,
        sync_budget_seconds: float,
        start_seconds: float,
    ) -> None:
        self.membership, self.history, self.shared_config = membership, history, shared_config
        self.min_workers, self.expected_workers = min_workers, expected_workers
        self.needs_majority = needs_majority
        self.sync_budget_seconds, self._start_seconds = sync_budget_seconds, start_seconds
        self.worker_group = SINGLE_RANK
        self.leaving = threading.Event()
        self.replicated_state = history.replicated_state
        self._link: LinkEnd | None = None
        self._peer_group: PeerGroup | None = None
        self._regroup: Regroup
        self._links: list[dict[str, str]] = []  # `LinkEnd.place` of all ranks of this worker
        self.addresses = list[str]()
        self._start_deadline = 0.0  # until then those who have seen no commit wait for all workers
        self._outer_step, self._proposal = 0, None  # of the sync that this worker asks for
        self._speed = 0.0  # inner steps a second
        self._speeds = dict[str, float]()  # of all members, at the last commit
        self._donors: dict[str, Dial] = {}  # those ahead, who serve the state to this rank
        self._present: set[str] = set()  # who was at the last rendezvous
        self._ignored: set[str] = set()  # who was named in the log as one that takes no part
        self._healed = False  # this worker has caught up, and has been in no commit since
        self._download_seconds = self._adopt_seconds = 0.0  # of catching up, until this worker takes part in a commit
        self._downloaded_at = 0.0

    @property
    def position(self) -> tuple[int, str, int]:
        """What decides whether others lead this worker, or it leads them: see `leaders`."""
        return self.history.version, self.history.chain, self._outer_step

    @property
    def peer_group(self) -> PeerGroup:
        """The connections of this rank with its peers."""
        assert self._peer_group is not None, "connect comes first"
        return self._peer_group

    def connect(self, worker_group: WorkerGroup, link: LinkEnd) -> None:
        """Begin to take part with these connected ranks, of which this one serves its part of the state at the link."""
        self.worker_group, self._link = worker_group, link
        self._peer_group = PeerGroup(self.membership.name, link, worker_group.rank, self.sync_budget_seconds)
        is_whole = self.needs_majority or 2 * self.min_workers > self.expected_workers  # else two parts could commit
        self._regroup = Regroup(self._peer_group, self.membership, is_whole)
        if worker_group.rank == 0:
            self.membership.connect(link)
        self._links = worker_group.all_gather_object(link.place)
        self.addresses = [link["address"] for link in self._links]
        self._start_deadline = time.monotonic() + self._start_seconds

    def ask_for(self, outer_step: int, proposal: Any) -> None:
        """Set the sync that this worker asks for at its next rendezvous, and what it wants committed with it."""
        self._outer_step, self._proposal = outer_step, proposal
        if self._download_seconds and not self._adopt_seconds:
            self._adopt_seconds = time.monotonic() - self._downloaded_at

    def rendezvous(self) -> Rendezvous:
        """Tell the others this worker's info, and return everybody's."""
        info = self._info(self.worker_group.all_gather_object(self.peer_group.id))
        found = rank_consensus.rendezvous(self.worker_group, lambda: self._meet(info, self.sync_budget_seconds))
        self.peer_group.admit(found)
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
        self.peer_group.come_to(found, [name for name in found.members if name not in names])  # they have to catch up
        configs = {name: found.members[name]["shared_config"] for name in names}
        usual, _ = Counter(json.dumps(configs[name], sort_keys=True) for name in names).most_common(1)[0]
        reference = json.loads(usual)  # of a tie that of the first name
        check_shared_configs([reference, self.shared_config], ["the others", self.membership.name])
        agreed = [name for name in names if configs[name] == reference]
        for name in names:
            if name not in agreed:
                self._name_once(name, "it has another configuration, and says so itself")
        return agreed

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
        return share_of_fastest(self._speeds, self.membership.name)

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
                progress_seconds=max(2.0, self.sync_budget_seconds / 3),
                total_seconds=JOIN_BUDGETS * self.sync_budget_seconds + max_bytes / _MIN_STATE_BYTES_PER_SECOND,
                max_bytes=max_bytes,
            )
            if state is not None:
                self._healed, self._downloaded_at, self._adopt_seconds = True, time.monotonic(), 0.0
                self._download_seconds = self._downloaded_at - start
                return state
            self.log(f"cannot catch up yet: {problem}")
            try:
                found = self.rendezvous()
                self._choose_donors(found, leaders(found.members))
            except RankLost:
                raise
            except TransportError as error:  # the others may train on for longer than a rendezvous may take
                self.log(f"cannot catch up yet: {error}")
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

    def _meet(self, info: MemberInfo, wait_seconds: float) -> Rendezvous:
        """Come to a rendezvous whose leaders can be reached: none of them died or went away while it waited."""
        deadline = time.monotonic() + wait_seconds
        while True:
            found = self._regroup.meet(info)
            if found is None:
                try:
                    left = max(0.1, deadline - time.monotonic())
                    found = self.membership.rendezvous(info, left, self._regroup.is_due)
                except TransportError:
                    if not self._regroup.is_due():
                        raise
                if found is None or self._regroup.is_due():  # somebody died meanwhile
                    continue
                found = Rendezvous(found.id, self._readable(found.members))
                if any(each["meets_directly"] for each in found.members.values()) and time.monotonic() < deadline:
                    continue  # they come as soon as they know that somebody is here
                self._regroup.note(found)
            if self.membership.name not in found.members:
                raise TransportError(
                    "this worker's own key is not trusted: write it into the file of outer.transport.trusted"
                )
            self.peer_group.admit(found)
            try:
                self.peer_group.connect(found, leaders(found.members))
            except MemberLost as lost:
                if time.monotonic() > deadline:
                    problem = f"of {', '.join(found.members)} not all came: {lost}"
                    raise TransportError(f"no complete rendezvous within {wait_seconds:g} s ({problem})") from lost
            else:
                return found

    def _info(self, groups: list[str]) -> MemberInfo:
        history, replicated_state = self.history, self.replicated_state
        is_new_run = history.version == 0 and time.monotonic() < self._start_deadline
        return {
            "shared_config": self.shared_config,
            "version": history.version,
            "chain": history.chain,
            "outer_step": self._outer_step,
            "needed_workers": max(self.min_workers, self.expected_workers if is_new_run else 0),
            "last_members": history.members if self.needs_majority else [],
            "links": self._links,
            "groups": groups,
            "healed": self._healed,
            "proposal": self._proposal,
            "finished": False,
            "speed": self._speed,
            "download_seconds": self._download_seconds,
            "adopt_seconds": self._adopt_seconds,
            "samples_per_step": replicated_state.samples_per_step if replicated_state is not None else 1,
            "meets_directly": False,
        }

    def _readable(self, members: dict[str, MemberInfo]) -> dict[str, MemberInfo]:
        """Return the infos that are some; who told something else is named, once."""
        readable = {}
        for name, info in members.items():
            try:
                readable[name] = read_told(info)
            except ValueError as error:
                self._name_once(name, str(error))
        return readable

    def _name_once(self, name: str, why: str) -> None:
        if name not in self._ignored:
            self._ignored.add(name)
            self.log(f"ignores {name}: {why}")

    def _choose_donors(self, found: Rendezvous, names: list[str]) -> None:
        reference = found.members[names[0]]["shared_config"]
        check_shared_configs([reference, self.shared_config], [names[0], self.membership.name])
        self._donors = {
            name: self._dial(member_of(name, found.members[name], self.worker_group.rank)) for name in names
        }
        if self.worker_group.rank == 0:
            self.membership.rest()

    def _dial(self, donor: Member) -> Dial:
        """Return what connects with the link of a donor."""
        link = self._link
        assert link is not None, "connect comes first"
        return lambda seconds: link.call(donor, STATE, seconds)

    def _wait_until_all_have_finished(self) -> None:
        end, finished = time.monotonic() + self.sync_budget_seconds / 2, {self.membership.name}
        while not self._present <= finished and time.monotonic() < end and not self.leaving.is_set():
            try:
                info = self._info([self.peer_group.id] * self.worker_group.size)  # the first rank alone asks
                found = self._meet(info | {"finished": True}, end - time.monotonic())
            except TransportError:
                return
            finished = {name for name, info in found.members.items() if info["finished"]}
            self._present &= found.members.keys()
