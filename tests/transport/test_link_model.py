import math

import pytest

from isthmus.core import UserError
from isthmus.transport.link_model import Collective, LinkModel

UNEVEN = [[0, 8e6, 8e6], [8e6, 0, 4e6], [8e6, 8e6, 0]]  # bits per second; 1 -> 2 is half as fast
MILLION = 1_000_000


def seconds(links: LinkModel, kind: str, *sizes: int) -> float:
    """Of a collective to which all ranks bring buffers, or parts, of the same sizes."""
    return links.seconds(Collective(kind, [sizes] * len(links.latency)))


def test_identity_35_an_all_reduce_sends_2_m_minus_1_mths_of_a_message_in_two_trips():
    links = LinkModel.between(4, 8e6, 0.01)
    assert seconds(links, "all_reduce", 4 * MILLION) == pytest.approx(2 * 3 / 4 * 4.0 + 0.01)
    small = 0.003  # seconds of a shot that is over before its first bytes have come
    assert seconds(links, "all_reduce", 4000) == pytest.approx(small + 2 * 0.01)


@pytest.mark.parametrize("num_workers", [2, 3, 5, 7, 12])
def test_without_latency_collectives_take_as_long_as_rings_to_the_last_bit(num_workers):
    links, count, steps = LinkModel.between(num_workers, 3.3e6), 1_234_567, num_workers - 1
    assert seconds(links, "all_reduce", count) == 2 * steps * (8 * (count / num_workers) / 3.3e6)
    assert seconds(links, "all_gather", count) == steps * (8 * count / 3.3e6)


def test_trips():
    """With nothing but a way of a second, a collective takes as many as it crosses it."""
    links = LinkModel.between(5, None, 1.0)
    assert {kind: seconds(links, kind, 9, 9, 9, 9, 9) for kind in ("all_gather", "all_to_all", "all_reduce")} == {
        "all_gather": 1.0,
        "all_to_all": 1.0,
        "all_reduce": 2.0,
    }
    assert seconds(links, "rendezvous") == 2.0


def test_the_busiest_worker_sets_the_pace():
    assert seconds(LinkModel.between(3, UNEVEN), "all_gather", MILLION) == pytest.approx(3.0)  # 1 sends for 1 and 2 s


def test_exchange_is_bound_by_the_busiest_uplink_or_downlink():
    links = LinkModel.between(3, 8e6, [[0, 0.1, 0.1], [0.1, 0, 0.3], [0.1, 0.1, 0]])

    def exchange(*sizes: list[int], links: LinkModel = links) -> float:
        return links.seconds(Collective("all_to_all", sizes))

    assert exchange([0, MILLION, MILLION], [0, 0, 0], [0, 0, 0]) == pytest.approx(2.0 + 0.1)
    assert exchange([0, 0, 0], [MILLION, 0, 0], [MILLION, 0, 0]) == pytest.approx(2.0 + 0.1)
    assert exchange([0, MILLION, 0], [0, 0, MILLION], [0, 0, 0]) == pytest.approx(1.0 + 0.3)
    assert exchange([MILLION, 0, 0], [0, MILLION, 0], [0, 0, MILLION]) == 0  # what one keeps crosses nothing
    slow = exchange([0, 0, 0], [0, 0, MILLION], [0, 0, 0], links=LinkModel.between(3, UNEVEN))
    assert slow == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("round_trip_ms", "megabits"),
    [(0, 1000), (20, 1000), (100, 800), (200, 400)],  # windows: infinite, 1 of 2.5 MB in 20 ms, 4 in 100, 4 in 200
)
def test_windows_bound_what_the_connections_of_a_link_move(round_trip_ms, megabits):
    links = LinkModel.even(2, 1000, round_trip_ms)
    assert links.rate(0, 1) == pytest.approx(1e6 * megabits)
    expected = 8e7 / (1e6 * megabits) + round_trip_ms / 2e3
    assert seconds(links, "all_gather", 10 * MILLION) == pytest.approx(expected)


def test_one_connection_moves_a_window_in_a_round_trip():
    links = LinkModel.between(2, 1e9, 0.05, 1e6)
    assert links.rate(0, 1, 1) == pytest.approx(8e7)
    assert links.rate(0, 1, 100) == 1e9
    assert links.exchange_seconds(lambda a, b: MILLION * (a < b), 1) == pytest.approx(0.1 + 0.05)


def test_no_bandwidth_means_infinite():
    assert seconds(LinkModel.between(2, None, 0.5), "all_gather", 10**12) == 0.5


def test_wrong_input_is_a_user_error():
    with pytest.raises(UserError, match=r"bandwidth: give one number, or 3 rows of 3"):
        LinkModel.between(3, [[1e6] * 2] * 2, 0.0)
    for window in (0, math.nan):
        with pytest.raises(UserError, match=r"window_bytes is .*: it should be above 0"):
            LinkModel.between(2, None, window_bytes=window)
