"""The next group of two links takes over the connections of the former one, where both are fit for that."""

import os
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from isthmus.link import Link, MemberLost, lane_pool
from isthmus.link.lane import CHUNK_BYTES, Lane
from tests.link.conftest import together
from tests.link.test_link import exchange_all, long_way, nothing, wait_until  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Others may use the machine: whoever is late by seconds is waited for."""
    monkeypatch.setattr("isthmus.link.link._TAKE_SECONDS", 8.0)
    monkeypatch.setattr(lane_pool, "_SILENT_SECONDS", 8.0)
    monkeypatch.setattr(lane_pool, "_LONGEST_SECONDS", 20.0)
    monkeypatch.setattr(lane_pool, "_LATE_SECONDS", 8.0)


def open_among(ends, numbers, name, seconds=40.0):
    """A group of some of the links, in this order."""
    members = [ends.members()[number] for number in numbers]
    links = [ends.links[number] for number in numbers]
    return together(
        [lambda rank=rank, link=link: link.open(name, members, rank, seconds) for rank, link in enumerate(links)]
    )


def ports(group, rank):
    """The local ports of the connections to a member."""
    return [lane.connection.getsockname()[1] for lane in group.channels[rank].lanes]


def break_off(group):
    """End all connections of a member at once, as if it had died."""
    with group._changed:
        for channel in group.channels.values():
            for lane in channel.lanes:
                with suppress(OSError):  # the other end was quicker
                    socket.socket.shutdown(lane.connection, socket.SHUT_RDWR)


def check(groups, size=3_000_000):
    sent, came = exchange_all(
        groups, [[0 if i == j else size + i for j in range(len(groups))] for i in range(len(groups))]
    )
    assert all(bytes(came[i][j]) == sent[j][i] for i in range(len(groups)) for j in range(len(groups)) if i != j)


def close(groups):
    for group in groups:
        group.close()


def send(link, lane, frame, payload=b""):
    with link._changed:
        lane.connection.send(frame.pack() + payload)


@pytest.fixture
def slow_reader(monkeypatch):
    """Whoever receives large messages reads them slowly, so that chunks are on their way when somebody dies."""
    read = Lane.read

    def slowly(lane):
        if lane.load == "nothing":
            time.sleep(0.01)
        return read(lane)

    monkeypatch.setattr(Lane, "read", slowly)
    return monkeypatch


def test_who_is_left_goes_on_over_the_same_connections(ends, long_way, slow_reader):  # noqa: F811
    """The memory of what was given up is neither read nor written any more, though chunks are still on their way."""
    ends.add(3)
    groups = ends.open()
    before = [ports(groups[0], 1), ports(groups[1], 0)]
    payload, into = np.full(20_000_000, 1, np.uint8), np.zeros(20_000_000, np.uint8)
    left_over = []

    def send_much():
        with pytest.raises(MemberLost) as lost:
            groups[0].exchange([memoryview(b""), memoryview(payload), memoryview(b"")], nothing(3), 20)
        payload[:] = 2
        return lost.value.ranks

    def receive():
        with pytest.raises(MemberLost) as lost:
            groups[1].exchange(nothing(3), [memoryview(into), memoryview(b""), memoryview(bytearray(1))], 20)
        left_over.append(into.copy())
        return lost.value.ranks

    def die():
        wait_until(lambda: into[0] == 1)
        break_off(groups[2])

    *lost, _ = together([send_much, receive, die])
    assert lost == [[2], [2]]
    assert 0 in left_over[0]  # it was not through
    slow_reader.undo()
    rest = open_among(ends, [0, 1], "rest")
    assert [ports(rest[0], 1), ports(rest[1], 0)] == before
    check(rest, 5 * CHUNK_BYTES + 3)
    assert np.array_equal(into, left_over[0])
    assert 2 not in into


@pytest.mark.parametrize("numbers", [[0, 1, 2], [2, 0, 1]])
def test_a_group_that_is_closed_leaves_its_connections_to_the_next_one(ends, long_way, numbers):  # noqa: F811
    ends.add(3)
    groups = ends.open()
    own = [{r: ports(group, r) for r in group.channels} for group in groups]
    close(groups)
    again = open_among(ends, numbers, "again")
    for rank, group in enumerate(again):
        assert {numbers[r]: ports(group, r) for r in group.channels} == own[numbers[rank]]
    check(again)
    assert not any(len(link._pool) for link in ends.links)


def test_who_closes_later_is_waited_for(ends):
    ends.add(2)
    groups = ends.open()
    before = ports(groups[1], 0)
    members = ends.members()
    groups[1].close()

    def late():
        time.sleep(0.3)
        groups[0].close()
        return ends.links[0].open("next", members, 0, 40)

    one, other = together([late, lambda: ends.links[1].open("next", members, 1, 40)])
    assert ports(other, 0) == before
    check([one, other])


def test_who_is_told_later_that_they_meet_again_keeps_the_connections(ends):
    """Where only those whom a rendezvous names are trusted, one link knows of it before the other."""
    ends.add(2)
    groups = ends.open()
    before, told = ports(groups[1], 0), threading.Event()
    close(groups)
    ends.links[0]._welcome._trusted = lambda: ends.trusted if told.is_set() else ends.trusted[:1]
    threading.Timer(0.3, told.set).start()
    again = open_among(ends, [0, 1], "again")
    assert ports(again[1], 0) == before
    check(again)


def test_who_is_not_trusted_any_more_is_not_let_in_again(ends, monkeypatch):
    monkeypatch.setattr("isthmus.link.handshake._TRUST_SECONDS", 0.2)
    ends.add(2)
    close(ends.open())
    ends.links[0]._welcome._trusted = lambda: ends.trusted[:1]
    members = ends.members()
    with pytest.raises(MemberLost):
        together([lambda rank=rank: ends.links[rank].open("again", members, rank, 2) for rank in (0, 1)])


def test_a_link_that_is_started_again_is_dialled(ends):
    ends.add(3)
    groups = ends.open()
    stays = ports(groups[0], 1)
    close(groups)
    identity, former = ends.links[2].identity, ends.links[2].id
    ends.links[2].close()
    wait_until(lambda: all(former not in link._pool._sets for link in ends.links[:2]))
    ends.links[2] = Link(identity, lambda: ends.trusted, tick_seconds=0.05)
    again = ends.open("again", 40.0)
    assert ports(again[0], 1) == stays
    check(again)


def test_who_takes_no_part_any_more_is_not_kept(ends):
    ends.add(3)
    close(ends.open())
    wait_until(lambda: all(link._pool.num_clean == 2 for link in ends.links))
    ends.links[0].meet(ends.members()[:2])
    wait_until(lambda: [len(link._pool) for link in ends.links] == [1, 2, 1])


def test_connections_are_not_kept_for_ever(ends, monkeypatch):
    monkeypatch.setattr(lane_pool, "_KEPT_SECONDS", 0.2)
    ends.add(2)
    close(ends.open())
    wait_until(lambda: not any(len(link._pool) or link._groups for link in ends.links))


def test_what_the_other_end_may_close_at_any_moment_is_not_taken(ends, monkeypatch):
    monkeypatch.setattr(lane_pool, "_TAKEN_SECONDS", 0.0)
    ends.add(2)
    groups = ends.open()
    before = ports(groups[1], 0)
    close(groups)
    wait_until(lambda: all(link._pool.num_clean == 1 for link in ends.links))
    time.sleep(0.01)
    groups = ends.open("next")
    assert not set(ports(groups[1], 0)) & set(before)
    check(groups)


def test_it_is_known_what_has_not_been_delivered():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        assert lane_pool._undelivered_bytes(one) == 0
        one.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += one.send(bytes(1 << 16))
        assert lane_pool._undelivered_bytes(one) > lane_pool._MAX_UNDELIVERED_BYTES
        while sent:
            sent -= len(other.recv(1 << 20))
        wait_until(lambda: lane_pool._undelivered_bytes(one) == 0)


def kept_lanes(ends):
    """Two meet and part; return the lanes that they keep."""
    ends.add(2)
    groups = ends.open()
    lanes = list(groups[0].channels[1].lanes)
    close(groups)
    wait_until(lambda: all(link._pool.num_clean == 1 for link in ends.links))
    return lanes


def test_what_is_lost_is_dialled_at_once(ends):
    """The connections broke while they belonged to no group."""
    lanes = kept_lanes(ends)
    with suppress(OSError):  # with the first one all others are closed
        for lane in lanes:
            socket.socket.shutdown(lane.connection, socket.SHUT_RDWR)
    check(ends.open("next"))


def test_an_end_that_the_link_has_not_read_yet_is_seen(ends):
    """Else a hello would be sent to nobody, and who waits for it would wait in vain."""
    lanes = kept_lanes(ends)
    link, other = ends.links[1], ends.members()[0]
    with link._changed:  # its thread reads nothing meanwhile
        for lane in lanes:
            with suppress(OSError):
                socket.socket.shutdown(lane.connection, socket.SHUT_RDWR)
        assert link._pool.take(other, "next", 1, 8.0) == []


def test_regroupings_leave_no_descriptor_or_thread_behind(ends):
    """Three meet, one of them dies, the others meet and go on: again and again."""
    ends.add(3)
    counts = []
    for number in range(100):
        groups = ends.open(f"all {number}")
        break_off(groups[2])
        wait_until(lambda groups=groups: all(group.lost is not None for group in groups))
        rest = open_among(ends, [0, 1], f"rest {number}")
        check(rest, 10)
        close(rest)
        if number % 10 == 9:
            wait_until(lambda: not any(link._closing for link in ends.links))
            wait_until(lambda: all(link._pool.num_clean == len(link._pool) for link in ends.links))
            counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    for what in zip(*counts, strict=True):
        assert max(what[5:]) <= max(what[:5])
