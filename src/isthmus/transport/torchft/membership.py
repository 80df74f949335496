"""An elastic engine: torchft's lighthouse says who is there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from isthmus.transport.base import TransportError
from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Membership, Rendezvous
from isthmus.transport.link_end import LinkEnd
from isthmus.transport.timeouts import TimedCalls
from isthmus.transport.torchft.lighthouse import BEAT_SECONDS, DEAD_SECONDS, LighthouseConnection
from isthmus.transport.trust import Trust

_LOGGER = logging.getLogger(__name__)


class TorchFTMembership(Membership):
    """The workers that come to a lighthouse of torchft's.

    The lighthouse forms a quorum when all workers that beat have come, or, its grace being over, more than half of
    them.

    What a worker tells is signed, and who is not trusted does not count: those who only reach the lighthouse can at
    worst withhold what was told. All timeouts follow from the sync budget, the bound on one collective.
    """

    forgets_seconds = DEAD_SECONDS + BEAT_SECONDS

    def __init__(self, lighthouse: str, name: str, sync_budget_seconds: float = 60.0) -> None:
        self.name = name
        self.sync_budget_seconds = sync_budget_seconds
        self._lighthouse = LighthouseConnection(lighthouse, name)
        self._calls = TimedCalls()
        self._link: LinkEnd | None = None
        self._ignored: set[str] = set()  # who was named in the log

    @override
    def connect(self, link: LinkEnd) -> None:
        self._link = link
        self._lighthouse.connect(self.sync_budget_seconds)

    @override
    def rendezvous(
        self, info: MemberInfo, wait_seconds: float, gives_up: Callable[[], bool] = lambda: False
    ) -> Rendezvous:
        link = self._link
        assert link is not None, "connect comes first"
        self._lighthouse.beats = True
        told = link.trust.sign(self.name, info)
        quorum = self._lighthouse.ask(self._calls, wait_seconds, link.announced, told, gives_up)
        addresses = {member.replica_id: member.store_address for member in quorum.participants}
        if addresses[self.name] != link.announced:
            raise TransportError(f"another process, at {addresses[self.name]}, calls itself {self.name} too")
        # the lighthouse counts its quorums anew when it restarts, and gives equal ones the same number
        rendezvous_id = f"{quorum.quorum_id}-{quorum.created.seconds}.{quorum.created.nanos:09d}"
        return Rendezvous(rendezvous_id, self._read(link.trust, {m.replica_id: m.data for m in quorum.participants}))

    @override
    def rest(self) -> None:
        self._lighthouse.beats = False

    @override
    def leave(self) -> None:
        self._calls.cancel()
        self._lighthouse.close()

    def _read(self, trust: Trust, told: dict[str, Any]) -> dict[str, MemberInfo]:
        """Return what those told who are trusted; the others are named in the log, once."""
        infos = {}
        for name, signed in told.items():
            try:
                infos[name] = trust.read(name, signed)
            except ValueError as error:
                if name not in self._ignored:
                    _LOGGER.warning("%s ignores %s at the lighthouse: %s", self.name, name, error)
                self._ignored.add(name)
        return infos
