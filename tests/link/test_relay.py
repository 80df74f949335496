"""Links that cannot be reached: who waits in vain registers where it was waited for, and others pass the bytes on."""

import os
import socket
import threading
import time

import pytest

from isthmus.link import Identity, Link, MemberLost, reach, relay, splice
from tests.link.conftest import together
from tests.link.test_link import exchange_all, nothing, wait_until


@pytest.fixture
def silent():
    """An address where connections are neither made nor refused, as behind a firewall that drops them."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(address)
        yield address
        for each in waiting:
            each.close()


@pytest.fixture
def soon(monkeypatch):
    """Whoever waits does so for shorter than between clusters."""
    monkeypatch.setattr(reach, "_FIRST_TURN_SECONDS", 0.2)
    monkeypatch.setattr("isthmus.link.link._SOON_SECONDS", 0.2)


def crosses(groups, size=3_000_000):
    sizes = [[0 if i == j else size + i for j in range(len(groups))] for i in range(len(groups))]
    sent, came = exchange_all(groups, sizes)
    return all(bytes(came[i][j]) == sent[j][i] for i in range(len(groups)) for j in range(len(groups)) if i != j)


@pytest.mark.parametrize("hidden", [[0], [1], [0, 1], [0, 2], [1, 2]])
def test_of_three_links_those_that_can_be_reached_help_the_others(ends, soon, silent, hidden):
    links = ends.add(3)
    ends.hidden = {links[rank]: silent for rank in hidden}
    assert crosses(ends.open())


def test_where_of_two_links_the_first_cannot_be_reached_it_comes_to_the_second(ends, soon, silent):
    links = ends.add(2)
    ends.hidden = {links[0]: silent}
    groups = ends.open()
    assert crosses(groups)
    assert not links[1]._relay._splices._ends  # nobody stands between them


def test_the_way_that_has_worked_is_taken_at_once_the_next_time(ends, silent):
    links = ends.add(3)
    ends.hidden = {links[0]: silent, links[1]: silent}
    for link in links:
        link.meet(ends.members())
    for number in range(3):
        start = time.monotonic()
        groups = ends.open(f"group {number}")
        took = time.monotonic() - start
        for group in groups:
            group.close()
        assert number == 0 or took < 0.9


def test_who_has_finished_and_leaves_lets_the_others_finish_through_it(ends, soon, silent):
    links = ends.add(3)
    ends.hidden = dict.fromkeys(links[1:], silent)
    groups = ends.open()
    assert links[0]._relay._splices._ends
    came = bytearray(5)
    groups[0].wait(groups[0].start(nothing(3), nothing(3)), 10)
    numbers = [groups[1].start(nothing(3), [*nothing(2), memoryview(came)])]
    leaving = threading.Thread(target=links[0].close)
    leaving.start()
    time.sleep(0.5)
    numbers.append(groups[2].start([memoryview(b""), memoryview(b"hello"), memoryview(b"")], nothing(3)))
    for group, number in zip(groups[1:], numbers, strict=True):
        group.wait(number, 10)
    assert came == b"hello"
    for link in links[1:]:
        link.close()
    leaving.join(1)
    assert not leaving.is_alive()


def test_two_links_that_nobody_can_reach_meet_at_a_relay_that_reads_nothing(ends, soon, silent, monkeypatch):
    passed_on = bytearray()
    pass_on = splice._End.send

    def send(end, data):
        passed_on.extend(data)
        pass_on(end, data)

    monkeypatch.setattr(splice._End, "send", send)
    middle = ends.add(1)[0]
    ends.links = []
    links = ends.add(2, via=middle.address)
    ends.hidden = dict.fromkeys(links, silent)
    groups = ends.open()
    secret = b"a word that no relay may read" * 1000
    came = bytearray(len(secret))
    together(
        [
            lambda: groups[0].exchange([memoryview(b""), memoryview(secret)], nothing(2), 10),
            lambda: groups[1].exchange(nothing(2), [memoryview(came), memoryview(b"")], 10),
        ]
    )
    assert bytes(came) == secret
    assert len(passed_on) > len(secret)
    assert secret[:29] not in passed_on
    middle.close()
    with pytest.raises(MemberLost):
        groups[0].wait(groups[0].start(nothing(2), [memoryview(b""), memoryview(bytearray(1))]), 10)


def test_what_was_sent_before_leaving_arrives_through_a_relay(ends, soon, silent, monkeypatch):
    middle = ends.add(1)[0]
    ends.links = []
    links = ends.add(2, via=middle.address)
    ends.hidden = dict.fromkeys(links, silent)
    payload, pairs = os.urandom(8_000_000), []
    monkeypatch.setattr("isthmus.link.link._TAKE_SECONDS", 8.0)
    for number in range(3):
        one, other = ends.open(f"group {number}", 40.0)
        pairs.append(set(middle._relay._splices._ends))
        came = bytearray(len(payload))

        def send(group=other):
            group.exchange([memoryview(payload), memoryview(b"")], nothing(2), 10)
            group.close()

        def receive(group=one, into=came):
            group.exchange(nothing(2), [memoryview(b""), memoryview(into)], 10)

        together([send, receive])
        assert bytes(came) == payload
        one.close()
    assert pairs[0] == pairs[1] == pairs[2]  # the next group takes over the connections
    for link in links:
        link.close()
    wait_until(lambda: not middle._relay._splices._ends)
    middle.close()


def test_a_service_of_a_link_that_has_registered_is_called(ends, soon, silent):
    donor, joiner, third = ends.add(3)
    ends.hidden = {donor: silent}
    for each in (donor, joiner, third):
        each.meet(ends.members())
    donor.serve("echo", lambda connection: (connection.sendall(connection.recv(5)), connection.close()))
    donor.register_at(ends.members())

    def ask():
        with joiner.call(ends.members()[0], "echo", 5) as connection:
            connection.sendall(b"hello")
            return connection.recv(5)

    assert ask() == b"hello"
    ends.hidden = {donor: silent, joiner: silent}  # and now through the third, where both are registered
    joiner.register_at([ends.members()[2]])
    joiner._relay._registered.clear()
    assert ask() == b"hello"


def test_of_two_links_at_the_same_address_with_the_same_key_the_right_one_is_reached(ends, soon):
    """As behind two NATs whose networks are numbered alike, in a run with a secret."""
    identity = Identity.generate()
    ends.add(1, identity=identity)
    namesake, other = ends.links[0], ends.add(1, identity=identity)[1]
    hidden = ends.add(1, identity=identity, via=other.address)[2]
    ends.links = [hidden, other]
    ends.hidden = {hidden: namesake.address}
    try:
        assert crosses(ends.open())
        assert not namesake._welcome._arrivals
    finally:
        namesake.close()


def test_registrations_are_renewed_and_silent_ones_end(ends, soon):
    middle = ends.add(1, patience_seconds=0.5)[0]
    link = ends.add(1, via=middle.address)[1]
    wait_until(lambda: link.id in middle._relay._registered)
    former = middle._relay._registered[link.id]
    former.end()
    wait_until(lambda: middle._relay._registered.get(link.id) not in (None, former))
    connection = middle._relay._registered[link.id]
    time.sleep(0.8)
    assert middle._relay._registered[link.id] is connection  # heartbeats keep it
    next(iter(link._reach._registrations._live.values())).tell = lambda: None  # it sends no heartbeat
    wait_until(lambda: middle._relay._registered.get(link.id) not in (None, connection))


def test_a_relay_that_does_not_answer_is_named_once(ends, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    ends.add(1, via=address)
    time.sleep(1.0)
    said = [
        line for line in caplog.messages if line.startswith(f"the relay at 127.0.0.1, port {address[1]}, cannot be")
    ]
    assert len(said) == 1


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_closed_at_once_and_tokens_are_good_once(ends, monkeypatch):
    monkeypatch.setattr(relay, "_PENDING_SECONDS", 0.3)
    middle, link = ends.add(2)
    link._reach._registrations.add([ends.members()[0]])
    wait_until(lambda: link.id in middle._relay._registered)

    def connect(preface):
        connection = socket.create_connection(middle.address, 5)
        connection.sendall(preface)
        return connection

    for preface in (b"C" + os.urandom(16), b"A" + os.urandom(16), b"X" * 17):
        with connect(preface) as stranger:
            assert is_closed(stranger)
    link._reach._registrations._answer = lambda relay, token: None  # it does not come
    token = os.urandom(16)
    assert middle._relay._send_for(link.id, token)
    with connect(b"C" + token) as first, connect(b"C" + token) as second:
        assert is_closed(first)
        assert is_closed(second)  # one at once, the other when nobody has come
    assert not middle._relay._pending
    assert not middle._relay._send_for(link.id, b"short")
    assert not middle._relay._send_for("nobody", os.urandom(16))
    stranger = Link(Identity.generate(), lambda: ends.trusted, via=middle.address)
    time.sleep(0.5)
    assert stranger.id not in middle._relay._registered
    stranger.close()


def test_pending_and_pairs_are_bounded_in_number(ends, monkeypatch):
    middle, link = ends.add(2)
    link._reach._registrations.add([ends.members()[0]])
    wait_until(lambda: link.id in middle._relay._registered)
    link._reach._registrations._answer = lambda relay, token: None
    assert all(middle._relay._send_for(link.id, os.urandom(16)) for _ in range(relay._MAX_PENDING))
    assert not middle._relay._send_for(link.id, os.urandom(16))
    middle._relay._pending.clear()
    middle._relay._splices._max_pairs = 0
    assert not middle._relay._send_for(link.id, os.urandom(16))
    assert middle._relay._send_for(link.id, os.urandom(16), is_own=True)


def test_pairs_end_together_and_hold_little_for_whoever_does_not_read(monkeypatch):
    monkeypatch.setattr(splice, "_HALF_OPEN_SECONDS", 0.3)
    splices = splice.Splices()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(2)]
    one, other = pairs[0][0], pairs[1][0]
    splices.join(pairs[0][1], pairs[1][1])
    one.setblocking(False)
    num_sent = 0
    for _ in range(200):
        try:
            num_sent += one.send(bytes(1 << 16))
        except BlockingIOError:
            time.sleep(0.005)
    assert num_sent < 200 << 16
    assert max(len(end.unsent) for end in splices._ends) <= splice._BUFFER_BYTES
    one.shutdown(socket.SHUT_WR)
    num_came = 0
    while data := other.recv(1 << 20):
        num_came += len(data)
    assert num_came == num_sent  # then the end of it
    other.sendall(b"the other way is still open")
    one.setblocking(True)
    assert one.recv(100) == b"the other way is still open"
    assert one.recv(100) == b""  # it has been half open for too long
    wait_until(lambda: not splices._ends)
    splices.close()
    for each in (one, other):
        each.close()


def test_a_closed_link_leaves_no_thread_and_no_descriptor_behind(ends, soon, silent, monkeypatch):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    monkeypatch.setattr(reach, "HANDSHAKE_SECONDS", 0.5)  # for as long a thread may be on its way to a silent address
    before = count()
    for _ in range(2):
        middle = ends.add(1)[0]
        ends.links = []
        links = ends.add(2, via=middle.address)
        ends.hidden = dict.fromkeys(links, silent)
        for each in links:
            each.meet(ends.members())
        crosses(ends.open(), 10)
        for each in [*links, middle]:
            each.close()
        ends.links = []
        wait_until(lambda: count() <= before)
