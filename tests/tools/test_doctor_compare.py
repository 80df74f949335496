"""What the doctor makes of reports and measurements."""

from __future__ import annotations

from isthmus.tools.doctor.compare import compare_clocks, compare_workers
from isthmus.tools.doctor.measure import Network

NAMES = ["a", "b", "c"]


def network(clocks: list[float]) -> Network:
    nothing = [[0.0] * len(clocks)] * len(clocks)
    return Network(clocks, nothing, nothing, nothing, nothing)


def test_of_three_clocks_the_odd_one_is_named() -> None:
    check = compare_clocks(NAMES, network([-100.0, 0, 0.5]))
    assert (check.status, check.found) == ("fail", "a is 100.0 s behind b")


def test_who_did_not_come_is_named() -> None:
    report = {"isthmus": {"version": "1"}, "versions": {}, "config": {}, "config_hash": "0", "data": {}}
    workers, *_ = compare_workers({"worker-0": report, "worker-2": report}, 4)
    assert (workers.status, workers.found) == ("fail", "worker-1, worker-3 did not come")
