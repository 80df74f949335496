import os
import re
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from fuzzing import mutate_bytes, mutate_json
from heal_world import (
    CHUNK_BYTES,
    NUM_CHUNKS,
    Donor,
    Hostile,
    Relay,
    break_once,
    dial,
    dials,
    die,
    flip,
    make_snapshot,
    manifest_end,
    middle_of_chunk,
    stall,
)
from tests.transport.links import open_link

from isthmus.transport import TransportError
from isthmus.transport.heal.channel import Channel
from isthmus.transport.heal.donor import StateServer
from isthmus.transport.heal.fetch import Fetched, fetch
from isthmus.transport.heal.snapshot import Outgoing, Snapshot
from isthmus.transport.link_end import member_at

pytestmark = pytest.mark.waits
MAX_BYTES = 1 << 26
SNAPSHOT = make_snapshot()
REPLY_OVERHEAD = 1000  # bytes of handshake and replies on a connection, beside manifest and chunks; generous


def get(*addresses, want=None, progress_seconds=20.0, total_seconds=60.0, max_bytes=MAX_BYTES) -> Fetched:
    return fetch(dials(*addresses), want, progress_seconds, total_seconds, max_bytes)


def is_complete(fetched: Fetched, snapshot: Snapshot = SNAPSHOT) -> bool:
    assert sum(fetched.chunks.values()) == NUM_CHUNKS
    state = snapshot.state
    return (
        fetched.id == snapshot.id
        and torch.equal(fetched.state["anchor"], state["anchor"])
        and torch.equal(fetched.state["momentum"], state["momentum"])
        and fetched.state["outer_step"] == state["outer_step"]
    )


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())  # of workers that other tests have killed
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("isthmus-"):
            thread.join(20)
            assert not thread.is_alive(), thread.name


@pytest.fixture
def open_donor():
    """Starts donors, and closes them after the test."""
    opened = []

    def start(provide=lambda seconds: SNAPSHOT, **options) -> Donor:
        opened.append(Donor(provide, **options))
        return opened[-1]

    yield start
    for donor in opened:
        donor.close()


@pytest.fixture
def open_relay():
    """Starts relays, and closes them after the test."""
    opened = []

    def start(*arguments) -> Relay:
        opened.append(Relay(*arguments))
        return opened[-1]

    yield start
    for relay in opened:
        relay.close()


@pytest.fixture
def failing(open_donor, open_relay):
    """Donors of which one fails: it, one that only votes, and one that has a snapshot only when the failure has come.

    So two of three agree at once, the failing one surely has chunks to send, and the last one has to do the rest.
    """

    def start(event) -> tuple[Relay, Relay, Donor]:
        donor = open_donor()
        failing = open_relay(donor.address, middle_of_chunk(7, SNAPSHOT), event)
        voter = open_relay(donor.address, manifest_end(SNAPSHOT), die)

        def provide(seconds):
            assert failing.happened.wait(seconds)
            return SNAPSHOT

        return failing, voter, open_donor(provide)

    return start


def test_from_one_donor_and_from_three(open_donor):
    donors = [open_donor() for _ in range(3)]
    one = get(donors[0].address)
    three = get(*[donor.address for donor in donors])
    assert is_complete(one)
    assert is_complete(three)
    assert one.digest == three.digest
    assert one.dropped == three.dropped == {}


def test_64_megabytes(open_donor, record_property):
    values = torch.arange(16 << 20, dtype=torch.float32)
    donor = open_donor(lambda seconds: Snapshot("large", {"values": values}))
    start = time.perf_counter()
    fetched = get(donor.address, max_bytes=64 << 20)
    record_property("seconds", time.perf_counter() - start)
    assert torch.equal(fetched.state["values"], values)


def test_a_donor_dies_and_the_others_send_only_what_is_missing(failing, open_relay):
    dying, voter, last = failing(die)
    counted = open_relay(last.address, 1 << 40, die)
    fetched = get(dying.address, voter.address, counted.address)
    assert is_complete(fetched)
    assert fetched.chunks[dying.address] >= 6
    assert dying.address in fetched.dropped
    assert fetched.chunks.get(voter.address, 0) == 0
    sent = fetched.chunks[counted.address] * CHUNK_BYTES
    assert len(counted.passed) < sent + manifest_end(SNAPSHOT) + NUM_CHUNKS * 100 + REPLY_OVERHEAD


@pytest.mark.processes
def test_a_donor_process_is_killed(the_zygote, tmp_path, open_relay, open_donor):
    donor = the_zygote.of("heal_world").start("serve_until_killed", folder=str(tmp_path))
    while not (tmp_path / "address").exists():
        time.sleep(0.01)
    killed = threading.Event()

    def kill(relay: Relay, rest: bytes) -> bytes:
        os.kill(donor, signal.SIGKILL)
        killed.set()
        return rest

    dying = open_relay((tmp_path / "address").read_text(), middle_of_chunk(7, SNAPSHOT), kill)

    def provide(seconds):
        assert killed.wait(seconds)
        return SNAPSHOT

    voter = open_relay(open_donor().address, manifest_end(SNAPSHOT), die)
    last = open_donor(provide)
    fetched = get(dying.address, voter.address, last.address)
    assert is_complete(fetched)
    assert fetched.chunks[dying.address] >= 6


def test_a_donor_that_stalls_is_done_without(failing):
    stalling, voter, last = failing(stall)
    fetched = get(stalling.address, voter.address, last.address, progress_seconds=2.0)
    assert is_complete(fetched)
    assert fetched.chunks[stalling.address] >= 6
    assert fetched.chunks[last.address] >= 1


def test_the_only_donor_stalls(open_donor, open_relay):
    stalling = open_relay(open_donor().address, middle_of_chunk(7, SNAPSHOT), stall)
    with pytest.raises(TransportError, match="nothing came for 0.5 s"):
        get(stalling.address, progress_seconds=0.5)


def test_a_donor_that_trickles_holds_nobody_up(failing):
    def trickle(relay: Relay, rest: bytes) -> bytes:
        while not relay.closed.wait(0.2):
            relay.send(b"x")
        raise ConnectionError

    trickling, voter, last = failing(trickle)
    fetched = get(trickling.address, voter.address, last.address, progress_seconds=2.0)
    assert is_complete(fetched)
    assert trickling.address not in fetched.dropped


def test_a_damaged_chunk_costs_a_donor_its_place(failing):
    damaging, voter, last = failing(flip)
    fetched = get(damaging.address, voter.address, last.address)
    assert is_complete(fetched)
    assert re.fullmatch(r"its chunk \d+ is not what its manifest promised", fetched.dropped[damaging.address])


def test_a_broken_connection_is_opened_again_and_nothing_sent_twice(open_donor, open_relay):
    calls = []
    donor = open_donor(lambda seconds: calls.append(seconds) or SNAPSHOT)
    relay = open_relay(donor.address, middle_of_chunk(7, SNAPSHOT), break_once)
    fetched = get(relay.address)
    assert is_complete(fetched)
    assert fetched.dropped == {}
    assert relay.num_connections == 2
    assert len(calls) == 1
    again = 2 * CHUNK_BYTES  # what was under way
    assert len(relay.passed) < NUM_CHUNKS * (CHUNK_BYTES + 100) + again + 2 * (manifest_end(SNAPSHOT) + REPLY_OVERHEAD)


def test_the_majority_is_believed(open_donor, open_relay):
    other = make_snapshot(seed=1)
    liar = open_relay(open_donor(lambda seconds: other).address, manifest_end(other) - 1, lambda relay, rest: rest)

    def provide(seconds):
        assert liar.happened.wait(seconds)  # the lie comes first
        return SNAPSHOT

    fetched = get(liar.address, *[open_donor(provide).address for _ in range(2)])
    assert is_complete(fetched)
    assert liar.address not in fetched.chunks
    assert fetched.dropped in ({}, {liar.address: "its state v1 differs from the majority's"})


def test_two_that_disagree_about_one_state_are_both_refused(open_donor):
    other = make_snapshot(seed=1)
    with pytest.raises(TransportError, match="disagree about state v1"):
        get(open_donor().address, open_donor(lambda seconds: other).address)


def test_donors_at_different_states(open_donor):
    newer = make_snapshot(seed=1, name="v2")
    first, second = open_donor(lambda seconds: newer), open_donor()
    assert is_complete(get(first.address, second.address), newer)
    fetched = get(first.address, second.address, want="v1")
    assert is_complete(fetched)
    assert fetched.dropped == {first.address: "its state is v2 now, not v1"}


def test_a_manifest_that_lies_about_its_chunks():
    def script(channel):
        channel.send({"ready": True})
        channel.send_text(Outgoing(make_snapshot(seed=1), CHUNK_BYTES).manifest)
        channel.receive(4096)
        channel.send({"ready": True})
        channel.send_raw(Outgoing(SNAPSHOT, CHUNK_BYTES).chunk(0))

    with pytest.raises(TransportError, match="its chunk 0 is not what its manifest promised"):
        get(Hostile(script).address)


def test_an_address_where_nobody_is():
    with pytest.raises(TransportError, match="Connection refused"):
        get("127.0.0.1:1")


def test_over_links_that_trust_one_another():
    donor, joiner, stranger = links = [open_link() for _ in range(3)]
    donor.named = joiner.named = [donor.identity.fingerprint, joiner.identity.fingerprint]
    stranger.named = [donor.identity.fingerprint]
    server = StateServer(lambda seconds: SNAPSHOT, lambda: 0, chunk_bytes=CHUNK_BYTES)
    donor.serve("state", server.serve)
    try:
        for link, is_let_in in [(joiner, True), (stranger, False)]:
            call = partial(link.call, member_at(donor.place, "donor"), "state")
            try:
                assert is_complete(fetch({"donor": call}, None, 20.0, 60.0, MAX_BYTES))
                assert is_let_in
            except TransportError:
                assert not is_let_in
        place = donor.place | {"key": joiner.identity.fingerprint}
        impostor = partial(joiner.call, member_at(place, "impostor"), "state")
        with pytest.raises(TransportError, match="holds another key"):
            fetch({"donor": impostor}, None, 20.0, 60.0, MAX_BYTES)
    finally:
        server.close()
        for link in links:
            link.close()


def test_nobody_to_ask():
    with pytest.raises(TransportError, match="none was named"):
        get()


def test_a_state_larger_than_expected(open_donor):
    with pytest.raises(TransportError, match="more than the 1000 bytes expected"):
        get(open_donor().address, max_bytes=1000)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("training did not pause"), "TimeoutError: training did not pause"),
        (RuntimeError("two\nlines\x1b[31m"), "RuntimeError: two lines"),
    ],
)
def test_a_snapshot_that_fails(open_donor, error, reason):
    def provide(seconds):
        raise error

    failing = open_donor(provide)
    with pytest.raises(TransportError, match=reason) as caught:
        get(failing.address)
    assert str(caught.value).isprintable()
    fetched = get(failing.address, open_donor().address)
    assert is_complete(fetched)


def test_a_snapshot_that_never_comes(open_donor):
    done = threading.Event()
    donor = open_donor(lambda seconds: done.wait() and SNAPSHOT)
    try:
        with pytest.raises(TransportError, match="the time is up"):
            get(donor.address, total_seconds=0.5)
    finally:
        done.set()


def test_a_slow_snapshot_is_waited_for(open_donor):
    waited = threading.Event()

    def provide(seconds):
        waited.wait(2.5)  # longer than progress_seconds
        return SNAPSHOT

    assert is_complete(get(open_donor(provide).address, progress_seconds=2.0))


def test_several_joiners_share_a_snapshot(open_donor):
    calls = []
    donor = open_donor(lambda seconds: calls.append(seconds) or SNAPSHOT, provide_seconds=7.0)
    with ThreadPoolExecutor(4) as joiners:
        assert all(is_complete(fetched) for fetched in joiners.map(get, [donor.address] * 4))
    assert calls == [7.0]


def test_when_the_state_moves_on_joiners_get_the_new_one_and_may_still_finish_the_old_one(open_donor):
    states = [SNAPSHOT, make_snapshot(seed=1, name="v2"), make_snapshot(seed=2, name="v3")]
    provided = iter(states)
    donor = open_donor(lambda seconds: next(provided))
    for state in states[:2]:
        assert is_complete(get(donor.address), state)
        donor.version += 1
    assert is_complete(get(donor.address, want="v1"), states[0])
    assert is_complete(get(donor.address), states[2])
    with pytest.raises(TransportError, match="cannot make a snapshot: StopIteration"):
        get(donor.address, want="v1")  # two are kept


def test_a_snapshot_that_nobody_needs_is_let_go(open_donor):
    memory = np.zeros(1000, dtype=np.float32)
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    held = [Snapshot("v1", {"values": torch.from_numpy(memory)})]
    del memory
    donor = open_donor(lambda seconds: held.pop(), keep_seconds=0.5)
    assert len(get(donor.address).state["values"]) == 1000
    assert gone.wait(30)


def test_serving_goes_on_while_training_keeps_the_interpreter_busy(open_donor):
    donor = open_donor()
    with ThreadPoolExecutor(1) as joiner:
        future = joiner.submit(get, donor.address)
        count = 0
        while not future.done():
            count += 1
        assert is_complete(future.result())


def test_a_closed_donor_serves_nobody(open_donor):
    donor = open_donor()
    donor.close()
    donor.close()
    with pytest.raises(TransportError, match="Connection refused"):
        get(donor.address)


@pytest.mark.parametrize(
    "reply", [{}, {"ready": 1}, {"error": 3}, {"error": "x" * 5000}, [], "ready", {"ready": True, "more": [[]] * 2000}]
)
def test_replies_that_make_no_sense(reply):
    with pytest.raises(TransportError, match="it sent a"):
        get(Hostile(lambda channel: channel.send(reply)).address)


def test_1000_damaged_conversations_harm_nobody(open_donor, open_relay):
    """A donor may say anything: its link keeps others from saying it, and the joiner takes no harm."""
    state = {"values": torch.arange(100)}
    relay = open_relay(open_donor(lambda seconds: Snapshot("v1", state)).address, 1 << 40, die)
    get(relay.address)
    random = Random(0)
    refused = 0
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as joiner:
        address = "127.0.0.1:{1}".format(*listener.getsockname())
        for _ in range(1000):
            future = joiner.submit(get, address, max_bytes=1000)
            stream = mutate_bytes(bytes(relay.passed), random)
            while not future.done():  # once, or twice if the first connection brought a chunk
                listener.settimeout(0.001)
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.sendall(stream)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):
                            pass
            try:
                assert future.result().digest
            except TransportError:
                refused += 1
    assert 500 < refused < 1000


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_500_requests_that_make_no_sense_harm_no_donor(open_donor):
    random = Random(0)
    donor = open_donor()
    request = b'{"get": "chunk", "id": "v1", "index": 3}'
    assert is_complete(get(donor.address))
    for number in range(500):
        mutate = (mutate_bytes, mutate_json)[number % 2]
        with dial(donor.address, 20.0) as connection, suppress(OSError):
            channel = Channel(connection, lambda: 20.0)
            channel.send_text(mutate(request, random)[:10_000])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert is_complete(get(donor.address))
