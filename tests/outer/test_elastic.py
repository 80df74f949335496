"""Workers that die, come and come back: what all agree on stays equal, and nobody's progress counts twice."""

from __future__ import annotations

import time

import pytest
from tests.elastic import Town, kill_at

from isthmus.core import SyncSchedule, split_balanced
from isthmus.outer import KeepProgress, Mix, Replace

SCHEDULES = {
    "blocking": {"schedule": SyncSchedule(3)},
    "warm start": {"schedule": SyncSchedule(3, warm_start_steps=4)},
    "fragments": {"schedule": SyncSchedule(4, 2, 1), "split": lambda m: split_balanced(m, 2), "merge": Mix(0.5)},
    "delayed": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": Replace()},
    "keep progress": {"schedule": SyncSchedule(3, overlap_steps=3), "merge": KeepProgress()},
}


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_undisturbed_it_is_an_ordinary_world(method):
    town = Town(24, min_workers=2, expected_workers=3, **method)
    for k in range(3):
        town.start(f"worker-{k}")
    town.wait()
    assert all(len(hashes) == 1 for hashes in town.hashes.values()), town.hashes
    assert len({worker.loop.anchor_hash() for worker in town.workers.values()}) == 1
    assert all(report.num_peers in (0, 3) for worker in town.workers.values() for report in worker.reports)


@pytest.mark.parametrize("point", ["meet", "group"])
@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_others_go_on_when_one_is_killed(method, point):
    town = Town(24, min_workers=2, expected_workers=3, **method)
    town.start("worker-0")
    town.start("worker-1")
    town.start("worker-2", kill_at(point, 4))
    town.wait()
    assert all(len(hashes) == 1 for hashes in town.hashes.values()), town.hashes
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()
    assert all(report.committed for report in town.workers["worker-0"].reports)


@pytest.mark.parametrize("method", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_killed_worker_comes_back_and_catches_up(method):
    town = Town(60, min_workers=1, expected_workers=2, **method)
    town.start("worker-0", each_step=lambda worker: time.sleep(0.02))
    town.start("worker-1", kill_at("group", 3))
    while len(town.hashes) < 6 and not town.errors:
        time.sleep(0.01)
    town.start("worker-1")
    town.wait()
    assert all(len(hashes) == 1 for hashes in town.hashes.values()), town.hashes
    assert town.workers["worker-0"].loop.anchor_hash() == town.workers["worker-1"].loop.anchor_hash()
    assert max(report.num_peers for report in town.workers["worker-1"].reports) == 2
