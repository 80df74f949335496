"""Real TLS connections on loopback: what crosses, who is named when somebody is gone, and what strangers can do."""

import gc
import json
import os
import random
import socket
import threading
import time
import weakref

import numpy as np
import pytest

from isthmus.core import UserError
from isthmus.link import Identity, Link, Member, MemberLost
from isthmus.link.lane import CHUNK_BYTES, DATA, HELLO, Frame, Lane
from isthmus.link.relay import ANSWER, CALL, TOKEN_BYTES
from tests.link.conftest import together

SIZES = (0, 1, 9, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7)


@pytest.fixture
def long_way(monkeypatch):
    """Four lanes for bulk, as on a way of forty milliseconds."""
    monkeypatch.setattr("isthmus.link.lane._LONG_WAY_SECONDS", 0.0)
    monkeypatch.setattr("isthmus.link.lane.MAX_LANES", 4)


def nothing(size):
    return [memoryview(b"")] * size


def exchange_all(groups, sizes, seconds=10.0):
    """Everybody sends `sizes[i][j]` random bytes from i to j; returns what was sent and what came."""
    generator = np.random.default_rng(sum(map(sum, sizes)))
    sent = [[generator.bytes(size) for size in row] for row in sizes]
    came = [[bytearray(sizes[j][i]) if i != j else bytearray() for j in range(len(sizes))] for i in range(len(sizes))]

    def call(i):
        return lambda: groups[i].exchange(list(map(memoryview, sent[i])), list(map(memoryview, came[i])), seconds)

    together([call(i) for i in range(len(groups))])
    return sent, came


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_all_sizes_arrive_as_they_were_sent(ends, long_way, size):
    ends.add(2)
    sent, came = exchange_all(ends.open(), [[0, size], [size, 0]])
    assert bytes(came[0][1]) == sent[1][0]
    assert bytes(came[1][0]) == sent[0][1]


@pytest.mark.parametrize(("most", "used"), [(None, 4), (2, 2), (1, 1), (100, 4)])
def test_bulk_goes_over_as_many_lanes_as_it_may(ends, long_way, monkeypatch, most, used):
    """Each of the two ends has four lanes for what it sends, and all of them carry something of a large message."""
    took = []
    take_frame = Lane._take_frame

    def counting(lane):
        taken = take_frame(lane)
        if taken and lane.load == "bulk":
            took.append(lane)
        return taken

    ends.add(2)
    groups, size = ends.open(), 40 * CHUNK_BYTES
    assert [group.num_bulk_lanes(1 - rank) for rank, group in enumerate(groups)] == [4, 4]
    groups[0].use_bulk_lanes(most)
    monkeypatch.setattr(Lane, "_take_frame", counting)
    exchange_all(groups, [[0, size], [0, 0]])
    assert len(set(took)) == used
    groups[0].use_bulk_lanes(None)
    took.clear()
    exchange_all(groups, [[0, size], [0, 0]])
    assert len(set(took)) == 4


def test_many_exchanges_of_any_sizes_among_three(ends, long_way):
    ends.add(3)
    groups, chooser = ends.open(), random.Random(0)
    for _ in range(30):
        sizes = [[chooser.choice(SIZES) for _ in range(3)] for _ in range(3)]
        sent, came = exchange_all(groups, sizes)
        assert all(bytes(came[i][j]) == sent[j][i] for i in range(3) for j in range(3) if i != j)


def test_who_is_ahead_does_not_disturb_who_is_behind(ends, long_way):
    """One end sends several messages before the other asks for any."""
    ends.add(2)
    one, other = ends.open()
    payload = os.urandom(2 * CHUNK_BYTES + 5)
    messages = [b"small", payload, b"small again", payload[::-1]]

    def send():
        for message in messages:
            one.exchange([memoryview(b""), memoryview(message)], nothing(2), 10)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.3)
    for message in messages:
        came = bytearray(len(message))
        other.exchange(nothing(2), [memoryview(came), memoryview(b"")], 10)
        assert bytes(came) == message
    thread.join()


def test_who_dies_is_named_by_all_and_memory_is_free_at_once(ends, long_way):
    links = ends.add(3)
    groups = ends.open()
    messages = [np.zeros(50_000_000, np.uint8) for _ in range(2)]
    held = [weakref.ref(message) for message in messages]

    def call(rank, message):
        out = [memoryview(b"")] * 3
        out[2] = memoryview(message)
        into = [memoryview(b"")] * 3
        into[2] = memoryview(bytearray(10))
        with pytest.raises(MemberLost) as lost:
            groups[rank].exchange(out, into, 20)
        return lost.value.ranks, str(lost.value)

    def die():
        time.sleep(0.2)
        for channel in groups[2].channels.values():
            for lane in channel.lanes:
                socket.socket.shutdown(lane.connection, socket.SHUT_RDWR)

    start = time.monotonic()
    *seen, _ = together([lambda: call(0, messages[0]), lambda: call(1, messages[1]), die])
    assert time.monotonic() - start < 3
    for ranks, message in seen:
        assert ranks == [2]
        assert "worker 2" in message
    messages.clear()
    wait_until(lambda: gc.collect() is not None and all(ref() is None for ref in held))
    wait_until(lambda: links[0]._groups == links[1]._groups == [])


def test_who_leaves_is_named(ends):
    ends.add(2)
    one, other = ends.open()
    other.close()
    with pytest.raises(MemberLost, match="worker 1 left the run") as lost:
        one.exchange(nothing(2), [memoryview(b""), memoryview(bytearray(1))], 5)
    assert lost.value.ranks == [1]


def test_who_does_not_come_is_named_though_alive(ends):
    ends.add(2)
    one, _ = ends.open()
    with pytest.raises(MemberLost, match="not done in 0.5 s, worker 1 did not come, though alive"):
        one.exchange(nothing(2), [memoryview(b""), memoryview(bytearray(1))], 0.5)


def test_what_was_lost_is_never_taken_for_done(ends):
    """What is forgotten when a group is given up must not look like what has arrived."""
    ends.add(2)
    one, _ = ends.open()
    for _ in range(2):
        with pytest.raises(MemberLost):
            one.exchange(nothing(2), [memoryview(b""), memoryview(bytearray(1))], 0.1)


def test_another_size_than_expected_is_the_senders_mistake(ends):
    ends.add(2)
    groups = ends.open()

    def call(rank, size):
        message = memoryview(bytearray(size))
        with pytest.raises(MemberLost) as lost:
            groups[rank].exchange([message] * 2, [message] * 2, 5)
        return str(lost.value)

    said = together([lambda: call(0, 300_000), lambda: call(1, 600_000)])
    assert any("do all workers run the same model" in each for each in said)


def test_a_member_that_does_not_come_is_named(ends):
    ends.add(2)
    members = ends.members()
    with pytest.raises(MemberLost, match="no connection to worker 1 within 0.3 s") as lost:
        ends.links[0].open("group", members, 0, 0.3)
    assert lost.value.ranks == [1]
    nobody = [Member(0, "worker 0", ("127.0.0.1", 1), members[0].fingerprint), members[1]]
    with pytest.raises(MemberLost, match="no connection to worker 0"):
        ends.links[1].open("group", nobody, 1, 0.3)


def test_a_member_must_hold_the_key_that_it_is_known_by(ends):
    ends.add(2)
    zero, one = ends.members()
    stranger = Identity.generate().fingerprint
    ends.trusted.append(stranger)
    with pytest.raises(MemberLost):
        ends.links[1].open("group", [Member(0, "worker 0", zero.address, stranger), one], 1, 0.5)


def attack(address, how):
    """A connection that does not behave; returns it, so that it stays open."""
    connection = socket.create_connection(address)
    if how == "garbage":
        connection.sendall(os.urandom(1000))
    elif how == "http":
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    elif how == "half a preface":
        connection.sendall(CALL + b"token")
    elif how == "a token of its own":
        connection.sendall(ANSWER + os.urandom(TOKEN_BYTES))
    return connection


@pytest.mark.parametrize("how", ["silent", "garbage", "http", "half a preface", "a token of its own"])
def test_strangers_hold_nobody_up(ends, how):
    ends.add(2)
    attackers = [attack(link.address, how) for link in ends.links for _ in range(100)]
    start = time.monotonic()
    sent, came = exchange_all(ends.open(), [[0, 10], [10, 0]])
    assert time.monotonic() - start < 4
    assert bytes(came[0][1]) == sent[1][0]
    for attacker in attackers:
        attacker.close()


def test_a_trusted_key_alone_does_not_make_a_member(ends):
    """Hellos that are none, or for a group that nobody opens, end nothing."""
    ends.add(2)
    groups = ends.open()
    insider = Identity.generate()
    ends.trusted.append(insider.fingerprint)
    context = insider.tls_context(ends.trusted, server=False)
    hello = json.dumps({"to": "", "group": "group", "rank": 1, "lane": 0, "num_lanes": 2}).encode()
    for frame in (
        Frame(DATA, 1 << 30).pack(),
        Frame(HELLO, 4000).pack() + b"{}" * 2000,
        Frame(HELLO, len(hello)).pack() + hello,
    ):
        with socket.create_connection(ends.links[0].address) as raw, context.wrap_socket(raw) as connection:
            connection.sendall(frame)
            time.sleep(0.1)
    sent, came = exchange_all(groups, [[0, 10], [10, 0]])
    assert bytes(came[0][1]) == sent[1][0]


def test_a_frame_that_is_too_long_ends_the_group_before_memory_is_taken(ends):
    ends.add(2)
    one, other = ends.open()
    lane = other.channels[0].lanes[0]
    with ends.links[1]._changed:
        lane.connection.send(Frame(DATA, 1 << 31).pack())
    with pytest.raises(MemberLost, match="announced a frame of 2147483648 bytes"):
        one.exchange(nothing(2), [memoryview(b""), memoryview(bytearray(1))], 5)


def test_groups_leave_no_descriptor_or_thread_behind(ends, monkeypatch):
    """As soon as both ends have left, not only after the time for which one waits for the other to read."""
    monkeypatch.setattr("isthmus.link.link._CLOSE_SECONDS", 60.0)
    ends.add(2)
    counts = []
    for number in range(30):
        groups = ends.open(f"group {number}")
        exchange_all(groups, [[0, 10], [10, 0]])
        for group in groups:
            group.close()
        wait_until(lambda: all(link._pool.num_clean == 1 and not link._closing for link in ends.links))
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    for what in zip(*counts, strict=True):
        assert max(what[15:]) <= max(what[:15])


@pytest.mark.parametrize("pause_seconds", [0, 0.2])
def test_links_that_close_one_after_the_other_do_not_wait(ends, pause_seconds, monkeypatch):
    """Nor does their thread look again and again at a connection whose other end has closed it."""
    monkeypatch.setattr("isthmus.link.link._CLOSE_SECONDS", 60.0)
    links = ends.add(2)
    groups = ends.open()
    exchange_all(groups, [[0, 10], [10, 0]])
    groups[0].close()
    time.sleep(pause_seconds)
    groups[1].close()
    wait_until(lambda: not any(link._groups or link._closing for link in links))
    wait_until(lambda: all(link._pool.num_clean == len(link._pool) for link in links))


def test_a_heartbeat_does_not_hide_why_a_group_has_ended(ends):
    """The others would blame whoever told them, as its connection ends."""
    ends.add(3)
    groups = ends.open()
    with ends.links[0]._changed:
        groups[0].close_for([2], "worker 2", "it is said to be dead", are_dead=True)
        ends.links[0]._tick()
    wait_until(lambda: groups[1].lost is not None)
    assert (groups[1].lost.ranks, groups[1].dead) == ([2], [2])


def test_addresses_that_cannot_be_listened_on():
    with pytest.raises(UserError, match=r"203.0.113.7 is no address of this machine"):
        Link(Identity.generate(), list, "203.0.113.7")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}, cannot be listened on"):
            Link(Identity.generate(), list, "127.0.0.1", port)


def test_nothing_is_sent_in_the_clear(ends):
    ends.add(2)
    groups = ends.open()
    secure = groups[0].channels[1].lanes[0].connection
    assert (secure.version(), secure.cipher()[0][:3]) == ("TLSv1.3", "TLS")


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_was_sent_before_leaving_arrives(ends, long_way):
    """Lanes end in any order: what is still on its way on one of them counts."""
    ends.add(2)
    payload = os.urandom(5_000_000)
    for number in range(10):
        one, other = ends.open(f"group {number}")
        came = bytearray(len(payload))

        def send(group=other):
            group.exchange([memoryview(payload), memoryview(b"")], nothing(2), 10)
            group.close()

        together(
            [send, lambda group=one, into=came: group.exchange(nothing(2), [memoryview(b""), memoryview(into)], 10)]
        )
        assert bytes(came) == payload
        one.close()
