"""Peers that say no goodbye between two groups, say it too late, or something else: nobody waits, nobody is let in."""

import json
import time
from contextlib import suppress

import pytest

from isthmus.link import Identity, Link, Member, MemberLost, lane_pool
from isthmus.link.lane import BYE, DATA, HELLO, Frame
from tests.link.conftest import together
from tests.link.test_lane_pool import check, close, patient, ports, send  # noqa: F401 (a fixture)
from tests.link.test_link import nothing, wait_until


def test_what_follows_a_goodbye_is_left_unread(ends):
    ends.add(2)
    one, other = ends.open()
    lane = one.channels[1].lanes[1]
    send(ends.links[1], other.channels[0].lanes[1], Frame(BYE, 0), b"next")  # in one record of TLS
    wait_until(lambda: lane.has_ended)
    time.sleep(0.2)
    with ends.links[0]._changed:
        assert lane.connection.recv(10) == b"next"


def test_who_keeps_the_former_group_costs_a_second_and_new_connections(ends, monkeypatch):
    monkeypatch.setattr("isthmus.link.link._TAKE_SECONDS", 1.0)
    ends.add(2)
    former = ends.open()
    before = ports(former[1], 0)
    former[1].close()
    begin = time.monotonic()
    groups = ends.open("next")
    assert time.monotonic() - begin < 3
    assert not set(ports(groups[1], 0)) & set(before)
    check(groups)
    wait_until(lambda: not any(len(link._pool) for link in ends.links))
    former[0].close()
    check(groups)


def test_who_says_no_goodbye_is_not_waited_for_long(ends, monkeypatch):
    monkeypatch.setattr(lane_pool, "_SILENT_SECONDS", 0.3)
    ends.add(2)
    one, other = ends.open()
    one.close()
    assert len(ends.links[0]._pool) <= 1
    wait_until(lambda: other.channels[0].has_left)
    wait_until(lambda: not len(ends.links[0]._pool) and not ends.links[0]._closing, 3)


def test_who_sends_on_and_on_is_not_read_for_ever(ends, monkeypatch):
    monkeypatch.setattr(lane_pool, "_LONGEST_SECONDS", 0.6)
    ends.add(2)
    one, other = ends.open()
    lane = other.channels[0].lanes[2]
    one.close()
    begin = time.monotonic()
    with suppress(OSError):  # until it is closed
        while time.monotonic() < begin + 10:
            send(ends.links[1], lane, Frame(DATA, 8, 99, 0), bytes(8))
            time.sleep(0.02)
    assert time.monotonic() < begin + 5
    assert not len(ends.links[0]._pool)


def test_a_hello_before_the_goodbye_is_misbehaviour(ends):
    ends.add(2)
    one, other = ends.open()
    lanes = list(other.channels[0].lanes)
    hello = json.dumps(
        {"to": ends.links[0].id, "group": "mine", "rank": 1, "lane": 0, "num_lanes": len(lanes)}
    ).encode()
    one.close()
    send(ends.links[1], lanes[0], Frame(HELLO, len(hello)), hello)
    for lane in lanes[1:]:
        with suppress(OSError):  # the first has all of them closed
            send(ends.links[1], lane, Frame(HELLO, len(hello)), hello)
    wait_until(lambda: not len(ends.links[0]._pool))
    assert not ends.links[0]._welcome._arrivals
    one, other = ends.open("next")
    send(ends.links[1], other.channels[0].lanes[1], Frame(HELLO, len(hello)), hello)
    with pytest.raises(MemberLost, match="it sent a frame of kind 1"):
        one.exchange(nothing(2), [memoryview(b""), memoryview(bytearray(1))], 5)


@pytest.mark.parametrize(
    "change",
    [
        {"to": "another link"},
        {"num_lanes": 99},
        {"lane": 0},
        {"service": "state"},
        {"group": 1},
    ],
)
def test_a_hello_that_is_none_lets_nobody_in(ends, change):
    ends.add(2)
    groups = ends.open()
    lanes = list(groups[1].channels[0].lanes)
    close(groups)
    wait_until(lambda: all(link._pool.num_clean == 1 for link in ends.links))
    for number, lane in enumerate(lanes):
        hello = {"to": ends.links[0].id, "group": "mine", "rank": 1, "lane": number, "num_lanes": len(lanes)} | change
        payload = json.dumps(hello).encode()
        send(ends.links[1], lane, Frame(HELLO, len(payload)), payload)
    wait_until(lambda: not any(len(link._pool) for link in ends.links))
    assert not ends.links[0]._welcome._arrivals


@pytest.mark.parametrize("revoked_at", [0, 1])
def test_a_key_that_is_revoked_is_let_in_no_more(revoked_at):
    """Where it would be dialled, and where it dials."""
    keys = [Identity.generate(), Identity.generate()]
    trusted = [[key.fingerprint for key in keys] for _ in keys]
    links = [Link(key, lambda known=known: known, tick_seconds=0.05) for key, known in zip(keys, trusted, strict=True)]
    members = [
        Member(r, f"worker {r}", link.address, link.identity.fingerprint, link.id) for r, link in enumerate(links)
    ]

    def open_both(name, seconds):
        return together([lambda r=r: links[r].open(name, members, r, seconds) for r in range(2)])

    close(open_both("group", 5))
    wait_until(lambda: all(link._pool.num_clean == 1 for link in links))
    trusted[revoked_at].remove(keys[1 - revoked_at].fingerprint)

    def try_to_open(rank):
        with suppress(MemberLost):
            groups.append(links[rank].open("next", members, rank, 2))

    groups = []
    together([lambda: try_to_open(0), lambda: try_to_open(1)])
    for group in groups:  # who dials may hear of it afterwards
        with pytest.raises(MemberLost):
            group.exchange(nothing(2), [memoryview(bytearray(1))] * 2, 5)
    assert not any(links[revoked_at]._groups)
    assert not any(links[revoked_at]._welcome._arrivals.values())
    for link in links:
        link.close()
