"""Workers that die, come and come back: what all agree on stays equal, and nobody's progress counts twice."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from tests.elastic import Town, kill_at, lose
from tests.transport.heal_world import SlowRecords

from isthmus.core import SyncSchedule, UserError, split_balanced
from isthmus.outer import Eager, KeepProgress, Mix, Offload, Replace
from isthmus.transport.address import join_address, split_address
from isthmus.transport.elastic.member import ElasticMember
from isthmus.transport.heal.fetch import fetch

pytestmark = pytest.mark.waits
SECONDS_A_RECORD = 0.33  # of a slow joiner's way to a donor
SCHEDULES = {
    "blocking": {"schedule": SyncSchedule(3)},
    "warm start": {"schedule": SyncSchedule(3, warm_start_steps=4)},
    "fragments": {"schedule": SyncSchedule(4, 2, 1), "split": lambda m: split_balanced(m, 2), "merge": Mix(0.5)},
    "delayed": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": Replace()},
    "keep progress": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": KeepProgress(0.5)},
    "offloaded": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": KeepProgress(), "offload": Offload("cpu")},
}


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_undisturbed_it_is_an_ordinary_world(method):
    town = Town(24, min_workers=2, expected_workers=3, **method)
    for k in range(3):
        town.start(f"worker-{k}")
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    assert all(report.num_peers in (0, 3) for worker in town.workers.values() for report in worker.reports)


def test_a_stragglers_sync_is_late_and_nobody_elses():
    """One is held up before a rendezvous for three rounds of the others, who wait no longer than the grace for it."""
    town = Town(36, min_workers=2, expected_workers=3, grace_seconds=0.5)
    arrivals = itertools.count(1)

    def straggle(point: str) -> None:
        if point == "rendezvous" and next(arrivals) == 4:
            begin, end = max(town.hashes), time.monotonic() + 15
            while max(town.hashes) < begin + 3 and time.monotonic() < end:
                time.sleep(0.01)

    for name, disturb in {"worker-0": lambda point: None, "worker-1": lambda point: None, "worker-2": straggle}.items():
        town.start(name, disturb, each_step=lambda worker: time.sleep(0.05))
    town.wait()
    reports = {name: worker.reports for name, worker in town.workers.items()}
    assert all(report.committed for name in ("worker-0", "worker-1") for report in reports[name])
    without = [report for report in reports["worker-0"] if report.num_peers == 2]
    assert 3 <= len(without) < len(reports["worker-0"])
    assert max(report.seconds for report in without) < 2.5
    assert reports["worker-0"][-1].num_peers == reports["worker-2"][-1].num_peers == 3
    assert any("are at version" in report.reason for report in reports["worker-2"])
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1


def test_who_needs_several_rounds_to_catch_up_is_waited_for_once(monkeypatch, caplog):
    """Without that it would be behind again whenever it has caught up, for ever."""
    caplog.set_level("INFO", "isthmus")
    seconds = []

    relays = []

    def slow_dial(self, donor):
        if self.membership.name != "worker-2":
            return dial(self, donor)
        relays.append(SlowRecords(join_address(*donor.address), SECONDS_A_RECORD))
        self._link._reach._is_direct[donor.id] = True  # else the donor comes by itself, past the slow way
        return dial(self, replace(donor, address=split_address(relays[-1].address)))

    def timed_fetch(donors, **terms):
        begin = time.monotonic()
        try:
            return fetch(donors, **terms)
        finally:
            if "worker-2" not in donors:
                seconds.append(time.monotonic() - begin)
                for relay in relays:
                    relay.close()

    dial = ElasticMember._dial
    monkeypatch.setattr(ElasticMember, "_dial", slow_dial)
    monkeypatch.setattr("isthmus.transport.elastic.rank_consensus.fetch", timed_fetch)
    town = Town(60, min_workers=2, expected_workers=2, grace_seconds=1.5)
    for name in ("worker-0", "worker-1"):
        town.start(name, each_step=lambda worker: time.sleep(0.05))
    while len(town.hashes) < 4 and not town.errors:
        time.sleep(0.01)
    town.start("worker-2", each_step=lambda worker: time.sleep(0.05))
    town.wait(60)
    reports = {name: worker.reports for name, worker in town.workers.items()}
    assert len(seconds) == 2  # the others were held up for the second one, else a third would have followed
    assert min(seconds) > 3, seconds
    without = [report for report in reports["worker-0"] if report.num_peers == 2 and report.seconds > 1]
    assert len(without) >= 2  # rounds that the first download took; the engine's grace of 1.5 s is in them
    assert [report.num_peers for report in reports["worker-2"] if report.committed].count(3) > 2
    assert any("for worker-2, whose link needs longer for the state than a round" in line for line in caplog.messages)
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1


@pytest.mark.parametrize("point", ["rendezvous", "connect", "vote"])
def test_the_others_begin_when_one_is_killed_at_the_first_meeting(point):
    town = Town(12, min_workers=2, expected_workers=3)
    town.start("worker-0")
    town.start("worker-1")
    town.start("worker-2", kill_at(point, 1, at_once=True)).join(20)
    town.start("worker-2")
    town.wait()
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1


@pytest.mark.parametrize("point", ["rendezvous", "connect", "vote", "committed"])
@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_others_go_on_when_one_is_killed(method, point):
    town = Town(24, min_workers=2, expected_workers=3, **method)
    town.start("worker-0")
    town.start("worker-1")
    town.start("worker-2", kill_at(point, 4))
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()
    assert all(report.committed for report in town.workers["worker-0"].reports)


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_killed_worker_comes_back_and_catches_up(method):
    town = Town(60, min_workers=1, expected_workers=2, **method)
    town.start("worker-0", each_step=lambda worker: time.sleep(0.02))
    town.start("worker-1", kill_at("connect", 3))
    while len(town.hashes) < 6 and not town.errors:
        time.sleep(0.01)
    town.start("worker-1")
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()
    assert max(report.num_peers for report in town.workers["worker-1"].reports) == 2


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_killed_before_the_first_sync_a_worker_comes_back_to_who_waits_for_it(method):
    town = Town(12, min_workers=2, expected_workers=2, **method)
    town.start("worker-0")
    town.start("worker-1", kill_at("rendezvous", 1)).join(20)
    town.start("worker-1")
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()


@pytest.mark.parametrize("point", ["heal", "healed"])
def test_killed_while_it_catches_up_a_worker_tries_again(point):
    town = Town(60, min_workers=1, expected_workers=2)
    town.start("worker-0", each_step=lambda worker: time.sleep(0.02))
    town.start("worker-1", kill_at("connect", 3))
    while len(town.hashes) < 4 and not town.errors:
        time.sleep(0.01)
    dying = town.start("worker-1", kill_at(point, 1, at_once=True))
    dying.join(20)
    assert not dying.is_alive()
    town.start("worker-1")
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["undecided", "decided"])
@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_worker_that_did_not_see_the_vote_end_learns_that_it_counted(method, pause):
    """The others have committed what it sent: it takes over their state, and sends that part no second time.

    Where they pause between steps, their syncs in flight are decided when it does so; else they mostly are not.
    """
    town = Town(36, min_workers=2, expected_workers=3, **method)
    town.start("worker-0", each_step=lambda worker: time.sleep(pause))
    town.start("worker-1", each_step=lambda worker: time.sleep(pause))
    town.start("worker-2", lose("committed", 5))
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    assert any("are at version" in report.reason for report in town.workers["worker-2"].reports)


@pytest.mark.parametrize("point", ["connect", "vote"])
def test_a_connection_that_fails_costs_one_attempt_and_nothing_else(point):
    town = Town(24, min_workers=2, expected_workers=3)
    for k in range(3):
        town.start(f"worker-{k}", lose(point, 4) if k == 2 else lambda point: None)
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    reports = [report for worker in town.workers.values() for report in worker.reports]
    assert all(report.committed and report.num_peers == 3 for report in reports)


def test_what_a_lone_worker_did_below_the_minimum_is_kept(caplog):
    """It waits, says so, and goes on when another comes."""
    caplog.set_level("INFO", "isthmus")
    town = Town(24, min_workers=2, expected_workers=2)
    town.start("worker-0")
    town.start("worker-1", kill_at("connect", 3)).join(20)
    time.sleep(0.5)
    assert "worker-0: waiting: 1 of at least 2 workers are here (worker-0)" in caplog.messages
    version = town.workers["worker-0"].loop.state.elastic_state["version"]
    town.start("worker-1")
    town.wait()
    assert not {version: hashes for version, hashes in town.hashes.items() if len(hashes) > 1}
    assert town.workers["worker-0"].loop.state.elastic_state["version"] > version
    assert all(report.committed for report in town.workers["worker-0"].reports)


def test_anchors_of_each_workers_own_are_refused():
    """Whoever joins takes over the anchors of one of the others."""
    town = Town(3, schedule=SyncSchedule(3, overlap_steps=3), merge=Eager())
    town.start("worker-0")
    with pytest.raises(UserError, match="workers that come and go need equal anchors"):
        town.wait()
