import pytest

from isthmus.core import UserError
from isthmus.transport.link_model import LinkModel

UNEVEN = [[0, 8e6, 8e6], [8e6, 0, 4e6], [8e6, 8e6, 0]]  # bits per second; 1 -> 2 is half as fast


def test_identity_35_ring_takes_2_m_minus_1_steps_of_one_mth():
    links = LinkModel.between(4, 8e6, 0.01)
    payload = 4_000_000
    assert links.ring_seconds(6, payload / 4) == pytest.approx(2 * 3 / 4 * payload * 8 / 8e6 + 6 * 0.01)


def test_the_slowest_link_of_the_ring_sets_the_pace():
    assert LinkModel.between(3, UNEVEN, 0.0).ring_seconds(2, 1_000_000) == pytest.approx(2 * 2.0)


def test_exchange_is_bound_by_the_busiest_uplink_or_downlink():
    million = 1_000_000
    links = LinkModel.between(3, 8e6, [[0, 0.1, 0.1], [0.1, 0, 0.3], [0.1, 0.1, 0]])
    up = [[0, million, million], [0, 0, 0], [0, 0, 0]]
    down = [[0, 0, 0], [million, 0, 0], [million, 0, 0]]
    own = [[million, 0, 0], [0, million, 0], [0, 0, million]]
    assert links.all_to_all_seconds(up) == pytest.approx(2.0 + 0.3)
    assert links.all_to_all_seconds(down) == pytest.approx(2.0 + 0.3)
    assert links.all_to_all_seconds(own) == pytest.approx(0.3)
    assert LinkModel.between(3, UNEVEN, 0.0).all_to_all_seconds(
        [[0, 0, 0], [0, 0, million], [0, 0, 0]]
    ) == pytest.approx(2.0)


def test_no_bandwidth_means_infinite():
    assert LinkModel.between(2, None, 0.5).ring_seconds(2, 1e12) == 1.0


def test_wrong_shape_is_a_user_error():
    with pytest.raises(UserError, match=r"bandwidth: give one number, or 3 rows of 3"):
        LinkModel.between(3, [[1e6] * 2] * 2, 0.0)
