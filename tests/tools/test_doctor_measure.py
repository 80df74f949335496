"""The doctor finds the links of a modelled world as they are: exactly, on its virtual clock."""

import pytest

from isthmus.tools.doctor.measure import _tournament, measure
from isthmus.transport.local import LocalWorld, run_workers


def measured(world, longest_seconds=10.0, clock_of=lambda rank: 0.0):
    def work(rank, transport):
        network = measure(transport.quorum(0), lambda: clock_of(rank), longest_seconds, transport.now)
        return network, transport.now()

    results = run_workers(world, work)
    assert all(result == results[0] for result in results), "all have the same figures"
    return results[0]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_each_meets_each_once_and_nobody_two_at_a_time(size):
    rounds = _tournament(size)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    everybody = [pair for pairs in rounds for pair in pairs]
    assert sorted(everybody) == [(a, b) for a in range(size) for b in range(a + 1, size)]


def test_rates_round_trips_and_windows_of_every_pair_are_found():
    """0 and 1 are 80 ms apart, 100 Mbit/s one way and 50 the other; 2 is 4 ms away, at 20 Mbit/s; windows of 0.5 MB."""
    bits = [[0, 1e8, 2e7], [5e7, 0, 2e7], [2e7, 2e7, 0]]
    latency = [[0, 0.04, 0.002], [0.04, 0, 0.002], [0.002, 0.002, 0]]
    network, _ = measured(LocalWorld(3, bits, latency, window_bytes=5e5))
    for a, b in network.pairs:
        assert network.round_trip_seconds[a][b] == pytest.approx(2 * latency[a][b], rel=1e-3)
        assert network.rate[a][b] == pytest.approx(bits[a][b] / 8, rel=1e-3)
        one = min(bits[a][b] / 8, 5e5 / (2 * latency[a][b]))
        assert network.one_connection_rate[a][b] == pytest.approx(one, rel=1e-3)
        assert network.num_connections[a][b] == (4 if {a, b} == {0, 1} else 1)
    assert network.one_connection_rate[0][1] < network.rate[0][1]
    assert network.links.bandwidth[1][0] == pytest.approx(5e7, rel=1e-3)
    assert network.links.round_trip_seconds(0, 1) == pytest.approx(0.08, rel=1e-3)


def test_a_slow_link_carries_little_and_takes_a_bounded_time():
    world = LocalWorld(2, 1e5, 0.05)  # 100 kbit/s
    sent = []
    exchange = world.links.exchange_seconds

    def counting(num_bytes, num_connections=None):
        sent.append(num_bytes(0, 1) + num_bytes(1, 0))
        return exchange(num_bytes, num_connections)

    object.__setattr__(world.links, "exchange_seconds", counting)
    network, seconds = measured(world)
    assert network.rate[0][1] == pytest.approx(12_500, rel=1e-3)
    assert sum(sent) / 2 < 4 * 20_000, "both ranks ask for the seconds of what crosses"
    assert seconds < 15


def test_transfers_stay_short_where_a_sync_may_take_little():
    _, seconds = measured(LocalWorld(2, 1e9, 0.1), longest_seconds=0.2)
    assert seconds < 15


def test_many_workers_are_measured_in_bounded_time():
    _, near = measured(LocalWorld(12, 1e8, 0.002))
    assert near < 60
    _, far = measured(LocalWorld(8, 1e8, 0.05, window_bytes=2.5e6))
    assert far < 100


def test_clocks_are_compared_with_the_middle_one():
    network, _ = measured(LocalWorld(3, 1e9), clock_of=[100.0, 7.0, 99.0].__getitem__)
    assert network.clocks_ahead_seconds == [1.0, -92.0, 0.0]
