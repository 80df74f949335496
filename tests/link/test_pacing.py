"""The bound on what the lanes to one member send together."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest

from isthmus.link import pacing
from isthmus.link.channel import Channel
from isthmus.link.lane import CHUNK_BYTES
from isthmus.link.pacing import Pacing

SEGMENT, ROUND_TRIP = 1000, 0.1


class Way:
    """Lanes whose numbers a test decides; the sockets are real, what the kernel counts is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connections: list[socket.socket]) -> None:
        self.connections, self.now = connections, 100.0
        self.infos = {
            each: pacing._Info(SEGMENT, int(1e6 * ROUND_TRIP), _bound_of(each), 0, 0, 0) for each in connections
        }
        monkeypatch.setattr(pacing, "_read", lambda connection, option: self.infos[connection])
        monkeypatch.setattr(pacing.time, "monotonic", lambda: self.now)
        self.pacing = Pacing()
        self.pacing.look(connections)

    def window(self, arrived: float, lost: float = 0.0, seconds: float = ROUND_TRIP) -> float:
        """Let a window pass, with the bytes a second that arrive and the share of the sent ones that is sent again."""
        self.now += seconds
        for each, info in self.infos.items():
            delivered = round(arrived * seconds / SEGMENT / len(self.connections))
            sent = delivered * SEGMENT / (1 - lost)
            self.infos[each] = info._replace(
                num_delivered=(info.num_delivered + delivered) % (1 << 32),
                bytes_sent=info.bytes_sent + round(sent),
                bytes_resent=info.bytes_resent + round(lost * sent),
                max_rate=_bound_of(each),
            )
        self.pacing.look(self.connections)
        return self.bound

    @property
    def bound(self) -> float:
        """What the kernel holds all lanes to, together."""
        return sum(map(_bound_of, self.connections))


def _bound_of(connection: socket.socket) -> int:
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, pacing._MAX_PACING_RATE, 8), "little")


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(4)]
    yield [near for near, _ in pairs]
    for pair in pairs:
        for each in pair:
            each.close()


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, connections: list[socket.socket]) -> Way:
    return Way(monkeypatch, connections)


def bounded(way: Way, rate: float) -> Way:
    """Overrun a way that takes so much."""
    for lost in (0.0, 0.0, 0.0, 0.25):
        way.window(rate, lost)
    return way


def test_nothing_is_bound_where_nothing_is_lost(way: Way) -> None:
    for _ in range(10):
        assert way.window(1e7) >= pacing._UNBOUND


def test_nothing_is_bound_on_a_noisy_line(way: Way) -> None:
    for _ in range(10):
        assert way.window(1e7, lost=0.03) >= pacing._UNBOUND


def test_lanes_that_overrun_the_way_are_bound_to_what_arrives_in_equal_parts(way: Way) -> None:
    bounded(way, 1e7)
    assert way.bound == pytest.approx(1.05e7, rel=0.01)
    assert {_bound_of(each) for each in way.connections} == {_bound_of(way.connections[0])}


def test_one_window_in_which_acknowledgements_came_in_a_burst_does_not_count(way: Way) -> None:
    for rate, lost in ((0.0, 0.0), (1e7, 0.0), (3e7, 0.0), (1e7, 0.25)):
        way.window(rate, lost)
    assert way.bound == pytest.approx(1.05e7, rel=0.01)


def test_the_first_round_trip_of_a_message_in_which_nothing_arrives_does_not_count(way: Way) -> None:
    bounded(way, 1e7)
    way.pacing.begin()
    way.window(0.0)
    for rate, lost in ((0.0, 0.0), (1e7, 0.25)):
        way.window(rate, lost)
    assert way.bound == pytest.approx(1.05e7, rel=0.01)


def test_the_bound_tries_one_step_where_the_way_takes_no_more(way: Way) -> None:
    bounded(way, 1e7)
    for _ in range(20):
        way.window(1e7)
    assert way.bound == pytest.approx(1.05 * 1.05e7, rel=0.01)


def test_the_bound_grows_ever_faster_where_the_way_takes_more_than_before(way: Way) -> None:
    bounded(way, 1e7)
    windows = 0
    while way.bound < 4e7:
        way.window(way.bound)
        windows += 1
    assert windows <= 20


def test_a_window_is_a_round_trip(way: Way) -> None:
    for _ in range(20):
        way.window(1e7, lost=0.25, seconds=ROUND_TRIP / 30)
    assert way.bound >= pacing._UNBOUND


def test_lanes_that_a_connection_has_left_begin_a_new_window(way: Way) -> None:
    bounded(way, 1e7)
    before = way.bound
    way.connections = way.connections[:3]
    way.window(1e6, lost=0.5)
    assert sum(map(_bound_of, way.connections)) == pytest.approx(0.75 * before)


def test_a_bound_is_found_again_by_the_next_group(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    bounded(way, 1e7)
    heir = Way(monkeypatch, way.connections)
    for _ in range(6):
        heir.window(1e7)
    assert heir.bound > 1.05e7 * 1.04  # it grows from what it was


def test_a_channel_looks_while_it_has_more_to_send_and_not_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Pacing, "begin", lambda self: done.append("begin"))
    monkeypatch.setattr(Pacing, "look", lambda self, connections: done.append("look"))
    channel = Channel("a member", lambda: None)
    done.clear()
    assert channel.next_frame("bulk") is None
    channel.send(1, memoryview(bytes(10)))  # a vote that waits, then a large message behind it, in two chunks
    channel.send(2, memoryview(bytes(CHUNK_BYTES + 1)))
    channel.send(3, memoryview(bytes(CHUNK_BYTES)))
    assert done == ["begin", "begin"]
    done.clear()
    while channel.next_frame("bulk") is not None:
        pass
    assert done == ["look"] * 3


def test_the_kernel_tells_what_was_sent(connections: list[socket.socket]) -> None:
    near = connections[0]
    near.sendall(bytes(100_000))
    info = pacing._read(near, socket.TCP_INFO)
    assert info is not None
    assert info.bytes_sent > 0
    assert info.bytes_resent == 0
    assert info.segment_bytes > 0
    assert math.isinf(pacing._bound([info]))
    near.setsockopt(socket.SOL_SOCKET, pacing._MAX_PACING_RATE, (123_456).to_bytes(8, "little"))
    info = pacing._read(near, socket.TCP_INFO)
    assert info is not None
    assert pacing._bound([info]) == 123_456
    near.close()
    assert pacing._read(near, socket.TCP_INFO) is None
