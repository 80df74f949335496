"""Whoever reaches the ports of a swarm, and holds no key of its run, moves nothing and delays nobody for long."""

import json
import socket
import time

import pytest
from hivemind.dht.node import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from tests.transport.hivemind.strangers import Stranger
from tests.transport.hivemind_scenarios import LISTEN
from tests.transport.links import connect, leave, meet
from tests.transport.threads import together

from isthmus.link import Identity
from isthmus.transport.hivemind import presence
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.matchmaking import _JoinService
from isthmus.transport.hivemind.membership import HivemindMembership
from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.hivemind.signature_validator import SignatureValidator
from isthmus.transport.trust import SECRET, Trust

pytestmark = pytest.mark.processes

HEARTBEAT_SECONDS = 10.0  # for which a worker may be silent


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def door(keys):
    """A first peer without keys: it lets everybody into the DHT."""
    node = Node(NodeSettings(keys / "door.key", listen=LISTEN))
    node.start(Trust(), 10)
    yield node.call(node.addresses())
    node.stop()


@pytest.fixture
def workers(keys, door, monkeypatch):
    """Two workers that know the run's secret."""
    monkeypatch.setenv(SECRET, "a secret of this run")
    members = [
        connect(HivemindMembership(name, "run", NodeSettings(keys / name, door, LISTEN), grace_seconds=60), 10)
        for name in "ab"
    ]
    monkeypatch.delenv(SECRET)
    yield members
    for member in members:
        leave(member)


@pytest.fixture
def stranger(door, workers):
    """One that knows where everybody is."""
    strangers = []

    def come(**options):
        addresses = [address for worker in workers for address in worker.membership.addresses()]
        strangers.append(Stranger(door + addresses, **options))
        return strangers[-1]

    yield come
    for each in strangers:
        each.close()


def meet_in_time(workers):
    start = time.monotonic()
    all_found = together(*(lambda each=each: meet(each) for each in workers))
    assert [list(found.members) for found in all_found] == [["a", "b"]] * 2
    assert all_found[0].id == all_found[1].id
    assert time.monotonic() - start < HEARTBEAT_SECONDS


def keys_of(worker):
    """Those of the DHT under which presence and declarations are."""
    matchmaker = worker.membership._matchmaker
    return worker.membership._presence._key, matchmaker._matchmaking.group_key_manager.current_key


def test_a_strangers_records_do_not_separate_the_workers(workers, stranger, caplog):
    one = stranger()
    of_presence, of_leaders = keys_of(workers[0])
    for number in range(2):  # as workers of isthmus wrote them once, and who are silent
        one.store(of_presence, f"QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5{number + 2}", f"worker-{number}")
    one.store(of_presence, one.peer_id, "its own")
    one.store(of_leaders, one.p2p.peer_id.to_bytes(), True, 3)
    meet_in_time(workers)
    own = stranger(record_validator=SignatureValidator(Identity.generate()))
    for name in (own.peer_id, workers[1].membership.peer_id):
        own.store(of_presence, f"{own.fingerprint} {name}", "b", 600)
        own.store(of_leaders, f"{own.fingerprint} {name}", True, 2)
    for _ in range(2):
        meet_in_time(workers)
    named = [line for line in caplog.messages if "ignores a record in the DHT: its key" in line]
    assert len(named) == len(set(named)) > 0


@pytest.mark.parametrize(
    "value", [b"junk", 7, None, ["a"], "x" * 10_000], ids=["bytes", "number", "nothing", "list", "long text"]
)
def test_junk_in_the_dht_is_ignored(workers, stranger, value):
    one, own = stranger(), stranger(record_validator=SignatureValidator(Identity.generate()))
    for key in keys_of(workers[0]):
        for subkey in ("junk", 7, b"\xff", None, f"{workers[0]._link.identity.fingerprint} {one.peer_id}"):
            one.store(key, subkey, value, 600)
        own.store(key, f"{own.fingerprint} junk", value, 600)
    meet_in_time(workers)


def test_nobody_writes_the_record_of_a_worker(workers, stranger, door):
    """Neither over it, nor a copy of it under another peer id, nor one that lives longer."""
    a, b = workers
    of_presence, _ = keys_of(a)
    meet_in_time(workers)
    one, own = stranger(), stranger(record_validator=SignatureValidator(Identity.generate()))
    at_door = door[0].rpartition("/")[2]
    subkey, other = (f"{a._link.identity.fingerprint} {peer}" for peer in (a.membership.peer_id, one.peer_id))
    value, expires = own.look(at_door, of_presence)[subkey]
    assert own.copy(at_door, of_presence, subkey, value, expires) == [False], "it is there already"
    assert own.copy(at_door, of_presence, subkey, value, expires + 600) == [False]
    assert own.copy(at_door, of_presence, other, value, expires) == [False]
    for each in (one, own):
        each.store(of_presence, subkey, "", 600)
    records = b.membership._node.call(b.membership._presence._others())
    assert {peer: record.name for peer, record in records.items()} == {a.membership.peer_id: "a"}
    meet_in_time(workers)


def test_whoever_asks_to_follow_is_turned_away(workers, stranger):
    """With nothing, with junk, and with what a worker told, which the stranger has seen somehow."""
    a, b = workers
    one = stranger()
    told = b.membership._matchmaker._dump(b._info([""]))

    async def follow(gather):
        stub = _JoinService.get_stub(one.p2p, a.membership._node.p2p.peer_id, namespace=a.membership._matchmaker._run)
        request = averaging_pb2.JoinRequest(schema_hash=b"isthmus 1", expiration=time.time() + 60, gather=gather)
        try:
            return [message.code async for message in await stub.rpc_join_group(request)]
        except Exception:
            return []

    for gather in (b"", b"junk", told, json.dumps({"name": "c", "told": "{}"}).encode()):
        codes = one.call(follow(gather))
        assert averaging_pb2.ACCEPTED not in codes
        assert not a.membership._matchmaker._admits(one.peer_id, gather), "nor if it had been let in"
    assert a.membership._matchmaker._admits(b.membership.peer_id, told)
    meet_in_time(workers)


def test_strangers_do_not_crowd_the_workers_out(workers, stranger):
    """They stand nearest to where the records belong, and lose them."""
    key = DHTID.generate(keys_of(workers[0])[0])
    for distance in range(1, 6):
        stranger(node_id=DHTID(key ^ distance)).forget()
    time.sleep(presence.LIFETIME_SECONDS + 1)  # what others keep of before has expired
    for _ in range(2):
        meet_in_time(workers)


def test_strangers_that_answer_nothing_delay_nobody_for_long(workers, stranger):
    """They are in the first peer's list of nodes, so workers are sent to them."""
    for one in [stranger() for _ in range(3)]:
        one.hang()
    for _ in range(5):
        meet_in_time(workers)


def test_a_worker_that_returns_is_known_again(workers, keys, door, monkeypatch):
    """The others think that it has seen their keys already."""
    a, b = workers
    meet_in_time(workers)
    leave(b)
    monkeypatch.setenv(SECRET, "a secret of this run")
    again = connect(HivemindMembership("b", "run", NodeSettings(keys / "b", door, LISTEN), grace_seconds=60), 10)
    try:
        meet_in_time([a, again])
    finally:
        leave(again)


def test_a_list_of_keys_says_who_is_met_and_may_change(keys, door, tmp_path):
    trusted, members = tmp_path / "trusted", []
    fingerprints = {}
    for name in "ab":
        identity = Identity.generate()
        identity.save(tmp_path / name)
        fingerprints[name] = identity.fingerprint
        trusted.write_text("\n".join(fingerprints.values()))
    for name in "ab":
        own_list = tmp_path / f"{name}-trusts"
        own_list.write_text(trusted.read_text())
        membership = HivemindMembership(name, "run", NodeSettings(keys / name, door, LISTEN), grace_seconds=60)
        members.append(connect(membership, 10, identity=str(tmp_path / name), trusted=str(own_list)))
    try:
        meet_in_time(members)
        (tmp_path / "a-trusts").write_text(fingerprints["a"])
        assert list(meet(members[0]).members) == ["a"]
    finally:
        for member in members:
            leave(member)


@pytest.fixture
def silent_peers():
    """Initial peers that take connections, and say nothing on them."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    yield [
        f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{PeerID(bytes([18, 32, *[k] * 32])).to_base58()}"
        for k, listener in enumerate(listeners)
    ]
    for listener in listeners:
        listener.close()


@pytest.mark.waits
def test_initial_peers_that_hang_do_not_let_a_worker_look_dead(keys, door, silent_peers):
    members = [
        connect(HivemindMembership(name, "run", NodeSettings(keys / name, [*door, *peers], LISTEN)), 10)
        for name, peers in (("a", []), ("b", silent_peers))
    ]
    a, b = (member.membership for member in members)
    try:
        for _ in range(80):
            records = a._node.call(a._presence._others())
            assert b.peer_id in records, "it seems to be gone"
            assert records[b.peer_id].expires - get_dht_time() > presence.LIFETIME_SECONDS / 2
            time.sleep(0.25)
    finally:
        for member in members:
            leave(member)
