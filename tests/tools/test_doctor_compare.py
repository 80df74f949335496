"""What the doctor makes of reports and measurements."""

from __future__ import annotations

import pytest

from isthmus.config import RunConfig
from isthmus.recipes import load_config
from isthmus.tools.doctor.compare import compare_clocks, compare_workers, judge_network, readable_bits
from isthmus.tools.doctor.measure import Network

NAMES = ["a", "b", "c"]


def network(*rates: float, clocks: tuple[float, ...] = (0, 0, 0)) -> Network:
    return Network(0.1, list(clocks), list(rates))


def configured(*overrides: str) -> RunConfig:
    common = ["outer.schedule.local_steps=5", "outer.schedule.warm_start_steps=0"]
    return load_config(None, [*common, "outer.transport.sync_budget_seconds=60", *overrides])


def test_of_three_clocks_the_odd_one_is_named() -> None:
    check = compare_clocks(NAMES, network(1, 1, 1, clocks=(-100.0, 0, 0.5)))
    assert (check.status, check.found) == ("fail", "a is 100.0 s behind b")


def test_who_did_not_come_is_named() -> None:
    report = {"isthmus": {"version": "1"}, "versions": {}, "config": {}, "config_hash": "0", "data": {}}
    workers, *_ = compare_workers({"worker-0": report, "worker-2": report}, 4)
    assert (workers.status, workers.found) == ("fail", "worker-1, worker-3 did not come")


@pytest.mark.parametrize(("count", "status"), [(9_600_000, "ok"), (39_600_000, "warn"), (79_600_000, "fail")])
def test_what_the_slowest_download_means(count: int, status: str) -> None:
    sync, pace = judge_network(NAMES, network(1e9, 1e6, 1e8), {"all": count}, configured())
    assert sync.status == status
    assert f"to b with 8 Mbit/s: {count / 1e6 + 0.4:.2g} s of the 60 s" in sync.found
    if status == "ok":  # 10 s every 5 steps are 10 % of the time where 5 steps take 90 s
        assert pace.found.endswith("every 5 inner steps: under 10% of the time where one takes 18 s")


def test_an_overlapped_sync_hides_behind_steps() -> None:
    overlapped = configured("outer.schedule.overlap_steps=4")
    _, pace = judge_network(NAMES, network(1e6, 1e6, 1e6), {"all": 1_600_000}, overlapped)
    assert pace.found == "a sync hides behind 4 inner steps where one takes 0.5 s or more"


@pytest.mark.parametrize(("rate", "text"), [(12.5, "100 bit/s"), (12.5e6, "100 Mbit/s"), (1.25e9, "10 Gbit/s")])
def test_bandwidths_are_readable(rate: float, text: str) -> None:
    assert readable_bits(rate) == text
