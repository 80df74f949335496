"""What the doctor makes of measured links: warnings, the seconds of a sync, and from which schedule on it hides."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from isthmus.config import RunConfig
from isthmus.recipes import load_config
from isthmus.tools.doctor.links import (
    hiding_table,
    judge_links,
    judge_sync,
    judge_tcp,
    link_table,
    readable_bits,
    sync_seconds,
)
from isthmus.tools.doctor.measure import Network
from isthmus.tools.doctor.this_machine import tcp_settings
from isthmus.tools.sync_traffic import SyncTraffic
from isthmus.transport.link_model import Collective, LinkModel

NAMES = ["a", "b", "c"]
MEGABYTE = 1_000_000.0


def network(
    rates: list[list[float]], round_trip: float = 0.1, connections: float = 4, one: float | None = None
) -> Network:
    """Measured rates in MB/s; those of one connection are a half of them, or as many as `one` says."""
    size = len(rates)
    rate = [[MEGABYTE * each for each in row] for row in rates]
    single = [[each / 2 if one is None else one * MEGABYTE for each in row] for row in rate]

    def everywhere(value: float) -> list[list[float]]:
        return [[value * (a != b) for b in range(size)] for a in range(size)]

    return Network([0.0] * size, everywhere(round_trip), everywhere(connections), single, rate)


def even(megabytes: float, size: int = 3, **more: float) -> Network:
    return network([[megabytes] * size] * size, **more)


def gathered(count: int, size: int = 3) -> dict[str, SyncTraffic]:
    """A sync in which each worker sends all others so many bytes."""
    collective = Collective("all_gather", [[count // (size - 1)]] * size)
    return {"all": SyncTraffic(count, 1, [collective])}


def configured(*overrides: str) -> RunConfig:
    common = ["outer.schedule.local_steps=5", "outer.schedule.warm_start_steps=0"]
    return load_config(None, [*common, "outer.transport.sync_budget_seconds=60", *overrides])


def printed(table: Table) -> list[str]:
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_identity_a_sync_takes_as_long_as_on_the_model_of_these_links():
    traffic = gathered(8 * 10**6) | {"small": SyncTraffic(9, 2, [Collective("all_reduce", [[9]] * 3)])}
    links = LinkModel.between(3, 8e6, 0.05)
    expected = {name: sum(map(links.seconds, each.collectives)) for name, each in traffic.items()}
    assert sync_seconds(even(1.0), traffic) == pytest.approx(expected)
    assert expected["all"] == pytest.approx(8 + 0.05)


@pytest.mark.parametrize(("count", "status"), [(9_600_000, "ok"), (69_600_000, "warn"), (129_600_000, "fail")])
def test_what_the_worst_pair_means(count: int, status: str) -> None:
    """Who sends a half to each of two others waits for what crosses the slow link."""
    measured = network([[0, 100, 100], [100, 0, 1], [100, 100, 0]])
    sync, pace = judge_sync(NAMES, measured, gathered(count), configured())
    assert sync.status == status
    assert f"{count / 1e6:.1f} MB" in sync.found
    seconds = (count / 2 / 1e6) * 1.01 + 0.05
    assert f"MB: {seconds:.3g} s of the 60 s" in sync.found
    assert "worst from b to c (8 Mbit/s, 100 ms there and back)" in sync.found
    assert (f"above {2 * seconds:.0f}, or send less" in sync.advice) == (status != "ok")
    if status == "ok":  # 4.9 s every 5 steps are 10 % of the time where 5 steps take 44 s
        assert pace.found.endswith("every 5 inner steps: under 10% of the time where one takes 8.82 s")


def test_an_overlapped_sync_hides_behind_steps() -> None:
    overlapped = configured("outer.schedule.overlap_steps=4")
    _, pace = judge_sync(NAMES, even(1, round_trip=0.0), gathered(1_600_000), overlapped)
    assert pace.found == "a sync hides behind 4 inner steps where one takes 400 ms or more"
    _, pace = judge_sync(NAMES, even(1, round_trip=0.0), gathered(1_600_000), overlapped, step_seconds=0.3)
    assert pace.found == "behind 4 inner steps 1.2 s of a sync's 1.6 s hide; workers wait 21.1% of the time"
    assert pace.status == "warn"
    assert (
        "local_steps to 48 or more; or, with a merge that takes it, overlap_steps to 6 and local_steps" in pace.advice
    )


@pytest.mark.parametrize(("step_seconds", "status", "share"), [(10.0, "ok", "3.1%"), (0.1, "warn", "76.2%")])
def test_with_the_seconds_of_a_step_the_share_of_waiting_is_known(step_seconds, status, share) -> None:
    measured, traffic = even(1, round_trip=0.0), gathered(1_600_000)
    _, pace = judge_sync(NAMES, measured, traffic, configured(), step_seconds)
    assert (pace.status, pace.found) == (status, f"workers wait 1.6 s every 5 inner steps: {share} of the time")
    assert bool(pace.advice) == (status == "warn")


def test_gradients_are_waited_for_at_every_step() -> None:
    traffic = {"gradients": SyncTraffic(1, 4, [Collective("all_reduce", [[3_000_000]] * 3)])}
    _, pace = judge_sync(NAMES, even(1, round_trip=0.0), traffic, load_config(None, ["outer.recipe=ddp"]))
    assert pace.found.startswith("workers wait 4 s after every inner step: under 10% of the time where one takes 36 s")


def test_the_table_of_schedules_is_that_of_the_virtual_clock() -> None:
    """Fragments of 0.95 and 0.1 s: tau = 10 steps of 0.1 s, H twice as many; or 90 % of the time computing."""
    rows = printed(hiding_table({"0": 0.95, "1": 0.1}))
    assert "100 ms 10 20 172" in rows
    assert "1 s 1 2 18" in rows
    assert "10 s 1 2 2" in rows
    assert printed(hiding_table({"all": 1.0}, 0.25))[-2:] == ["250 ms 4 4 36", ""]


def test_links_that_differ_by_direction_have_two_rows() -> None:
    rows = printed(link_table(NAMES, network([[0, 1, 1.1], [0.1, 0, 1], [1, 1, 0]], connections=4)))
    assert "a to b 100 ms 4 Mbit/s 4 8 Mbit/s" in rows
    assert "b to a 100 ms 400 kbit/s 4 800 kbit/s" in rows
    assert "a and c 100 ms 4.4 Mbit/s 4 8.8 Mbit/s" in rows


def test_of_many_links_the_slowest_are_shown() -> None:
    rates = [[1.0 + (5 in (a, b)) for b in range(9)] for a in range(9)]
    rows = printed(link_table(list("abcdefghi"), network(rates)))
    assert sum(" and " in row for row in rows) == 28
    assert not any("f and" in row or "and f" in row for row in rows)
    assert "the 28 slowest of 36 pairs; " in " ".join(rows)


def test_the_slowest_link_is_named_and_windows_that_bind() -> None:
    rates = [[0, 40, 40], [40, 0, 39], [40, 40, 0]]
    check = judge_links(NAMES, network(rates))
    assert (check.status, check.found) == ("ok", "the slowest is b to c: 312 Mbit/s")
    check = judge_links(NAMES, network(rates, one=10.0))  # four move four times as much as one
    assert check.status == "warn"
    assert "a to b, a to c, b to a and others would carry more with larger windows" in check.found
    assert "tcp_rmem" in check.advice
    assert judge_links(NAMES, network(rates, one=40.0, connections=1)).status == "ok"


CUBIC = {"congestion_control": "cubic", "slow_start_after_idle": True}


@pytest.mark.parametrize(
    ("tcp", "round_trip", "status"),
    [
        (CUBIC, 0.1, "warn"),
        (CUBIC, 0.0005, "ok"),
        (CUBIC | {"slow_start_after_idle": False}, 0.1, "ok"),
        (CUBIC | {"congestion_control": "bbr"}, 0.1, "ok"),
        ({"congestion_control": "", "slow_start_after_idle": False}, 0.1, "ok"),
    ],
)
def test_a_slow_start_after_idle_steps_matters_on_long_ways(tcp, round_trip, status) -> None:
    check = judge_tcp(1, tcp, even(1, round_trip=round_trip))
    assert check.status == status
    assert ("tcp_slow_start_after_idle=0" in check.advice) == (status == "warn")


def test_the_settings_are_those_of_this_machine() -> None:
    settings = tcp_settings()
    with open("/proc/sys/net/ipv4/tcp_available_congestion_control") as file:
        assert settings["congestion_control"] in file.read().split()
    with open("/proc/sys/net/ipv4/tcp_slow_start_after_idle") as file:
        assert settings["slow_start_after_idle"] == (file.read().strip() != "0")


@pytest.mark.parametrize(("rate", "text"), [(12.5, "100 bit/s"), (12.5e6, "100 Mbit/s"), (1.25e9, "10 Gbit/s")])
def test_bandwidths_are_readable(rate: float, text: str) -> None:
    assert readable_bits(rate) == text
