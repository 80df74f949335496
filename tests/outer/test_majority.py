"""Of a network that is cut only one part goes on, however many have joined; survivors of single deaths go on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.elastic import Killed, Town
from tests.local_membership import LocalRendezvousServer
from typing_extensions import override

pytestmark = pytest.mark.waits
NAMES = [f"worker-{k}" for k in range(6)]


class CutServer(LocalRendezvousServer):
    """A place where workers meet that can be cut into parts, which do not see one another."""

    def __init__(self) -> None:
        super().__init__(grace_seconds=10.0)
        self._parts: dict[str, LocalRendezvousServer] = {}

    def cut(self, *parts: list[str]) -> None:
        for names in parts:
            part = LocalRendezvousServer(grace_seconds=10.0)
            for name in names:
                part.connect(name)
                self._parts[name] = part
        for name in self._parts:
            super().kill(name)  # whoever waits here goes on to its part

    def heal(self) -> None:
        parts, self._parts = self._parts, {}
        for name, part in parts.items():
            self.connect(name)
            part.kill(name)

    @override
    def rendezvous(self, name, *rest):
        part = self._parts.get(name)
        return part.rendezvous(name, *rest) if part else super().rendezvous(name, *rest)


def versions(town: Town) -> list[int]:
    return [town.workers[name].loop.state.elastic_state["version"] for name in NAMES]


def all_six_commit(town: Town) -> bool:
    """Whether all have been in the same commit: who comes too late for the first one catches up before it counts."""
    workers = [town.workers.get(name) for name in NAMES]
    return all(worker and worker.reports and worker.reports[-1].num_peers == 6 for worker in workers)


def wait_until(condition: Callable[[], object], town: Town) -> None:
    end = time.monotonic() + 20
    while not condition() and not town.errors:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_of_two_halves_neither_commits_and_together_they_go_on(caplog):
    """Six of four that were expected: each half has more than half of four, and no more than half of six."""
    caplog.set_level("INFO", "isthmus")
    town = Town(90, min_workers=None, expected_workers=4)
    town.server = CutServer()
    for name in NAMES:
        town.start(name, each_step=lambda worker: time.sleep(0.01))
    wait_until(lambda: all_six_commit(town), town)
    town.server.cut(NAMES[:3], NAMES[3:])
    waits = "waiting: of the 6 workers that made the last commit 3 are here"
    wait_until(lambda: sum(waits in line for line in caplog.messages) == 6, town)
    before = versions(town)
    time.sleep(1.0)
    assert versions(town) == before
    assert max(before) - min(before) <= 1  # the cut may have come when some had seen the end of a vote
    town.server.heal()
    town.wait(40)
    assert min(versions(town)) > max(before)
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert [worker.reports[-1].num_peers for worker in town.workers.values()] == [6] * 6


def test_four_of_six_go_on_without_the_others_which_take_over_their_state():
    town = Town(90, min_workers=None, expected_workers=4)
    town.server = CutServer()
    for name in NAMES:
        town.start(name, each_step=lambda worker: time.sleep(0.01))
    wait_until(lambda: all_six_commit(town), town)
    town.server.cut(NAMES[:4], NAMES[4:])
    before = max(versions(town))
    wait_until(lambda: min(versions(town)[:4]) >= before + 2, town)
    assert max(versions(town)[4:]) <= before + 1
    town.server.heal()
    town.wait(40)
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}


def test_those_who_survive_one_death_after_the_other_go_on():
    """Three of six are left in the end: a majority of the four before, and of the four that were expected."""
    town = Town(90, min_workers=None, expected_workers=4, grace_seconds=10.0)

    def dies_of(num_peers: int) -> Callable[[str], None]:
        """Dies when it connects for a sync after one of so many workers, once all six have met."""

        def disturb(point: str) -> None:
            first = town.workers.get(NAMES[0])
            met = [report.num_peers for report in first.reports] if first else []
            if point == "connect" and len(NAMES) in met and met[-1] == num_peers:
                raise Killed

        return disturb

    for number, name in enumerate(NAMES):
        disturb = dies_of(number + 1) if number > 2 else lambda point: None
        town.start(name, disturb, each_step=lambda worker: time.sleep(0.01))
    town.wait(40)
    survivors = [town.workers[name] for name in NAMES[:3]]
    assert [worker.reports[-1].num_peers for worker in survivors] == [3] * 3
    assert {report.num_peers for worker in survivors for report in worker.reports if report.committed} == {3, 4, 5, 6}
    assert len({worker.loop.anchor_hash() for worker in survivors}) == 1
