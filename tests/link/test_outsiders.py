"""Whoever reaches the ports of a group while it exchanges: nothing is read, nobody is lost, nobody waits."""

import ssl
import threading
import time

import pytest
from benchmarks.outsiders import attacks

from isthmus.link import Identity, handshake
from tests.link.conftest import together

SECONDS = 0.5  # of each attack
ATTACKS = {
    "64 silent": lambda ends: attacks.silent(64),
    "300 silent": lambda ends: attacks.silent(300),
    "junk": lambda ends: attacks.junk,
    "giant lengths": lambda ends: attacks.giant_lengths,
    "slow": lambda ends: attacks.slow_handshake,
    "replay": lambda ends: attacks.replay(attacks.record(ends.links[0].identity, ends.trusted, ends.links[1].address)),
    "another key": lambda ends: attacks.with_key(Identity.generate(), ends.trusted),
    "TLS 1.2": lambda ends: attacks.with_key(Identity.generate(), ends.trusted, ssl.TLSVersion.TLSv1_2),
    "a member gone bad": lambda ends: attacks.bad_member(ends.links[0].identity, ends.trusted),
}


@pytest.fixture
def pair(ends):
    """Two ends with a group."""
    ends.add(2)
    return ends, ends.open()


def exchange(groups):
    """Both send the other eight bytes."""
    came = [bytearray(8), bytearray(8)]

    def send(rank):
        groups[rank].exchange([memoryview(b"message!")] * 2, [memoryview(came[rank])] * 2, 5.0)

    together([lambda: send(0), lambda: send(1)])
    assert came == [b"message!"] * 2


@pytest.mark.waits
@pytest.mark.parametrize("name", ATTACKS)
def test_a_group_goes_on_while_its_ports_are_attacked(pair, name):
    ends, groups = pair
    attack, longest = ATTACKS[name](ends), 0.0
    told = []
    threads = [
        threading.Thread(target=lambda address=link.address: told.append(attack(address, SECONDS)))
        for link in ends.links
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        begin = time.monotonic()
        exchange(groups)
        longest = max(longest, time.monotonic() - begin)
    assert told == [0, 0]
    assert longest < 2.0  # of a machine that others may use; undisturbed it is milliseconds


def test_a_key_is_asked_for_at_every_connection(pair):
    """A trusted key is told something; from the moment at which it is revoked it is not."""
    ends, _ = pair
    former = Identity.generate()
    attack, address = attacks.with_key(former, list(ends.trusted)), ends.links[0].address
    ends.trusted.append(former.fingerprint)
    ends.links[0].serve("state", lambda connection: (connection.sendall(b"weights"), connection.close()))
    assert attack(address, 0.1) > 0
    ends.trusted.remove(former.fingerprint)
    assert attack(address, 0.3) == 0


def test_connections_for_groups_that_there_are_not_are_bounded_and_hold_nobody_up(ends, monkeypatch):
    """They are of a member gone bad: the others' are kept."""
    monkeypatch.setattr(handshake, "_MAX_ARRIVALS", 20)
    one, _, bad = ends.add(3)
    attacks.bad_member(bad.identity, list(ends.trusted))(one.address, 1.0)
    with one._welcome._changed:  # the last of them may still be coming
        assert 0 < sum(map(len, one._welcome._arrivals.values())) <= 20
        assert one._welcome._arrivals.keys() == one._welcome._came_at.keys()
    ends.links.remove(bad)
    try:
        assert len(ends.open()) == 2
    finally:
        bad.close()


def test_who_knocks_costs_no_more_where_many_keys_are_trusted():
    """What TLS needs to know of all keys is made once."""
    own, keys = Identity.generate(), [Identity.generate().fingerprint for _ in range(3)]
    context = own.tls_context(keys, server=True)
    assert own.tls_context(reversed(keys), server=True) is context
    assert own.tls_context(keys[:2], server=True) is not context
    assert own.tls_context(keys, server=False) is not own.tls_context(keys, server=True)
