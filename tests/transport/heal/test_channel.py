import socket
import tracemalloc
from random import Random

import pytest
from fuzzing import mutate_bytes

from isthmus.transport import TransportError
from isthmus.transport.heal.channel import Channel

LIMIT = 1000
MESSAGE = {"ready": True, "text": "é" * 20, "numbers": [1, 2.5, None]}


@pytest.fixture
def ends():
    """Both ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one, lambda: 10.0), Channel(other, lambda: 10.0)


def test_messages_and_raw_bytes_in_order(ends):
    joiner, donor = ends
    for number in range(3):
        joiner.send({"number": number})
        donor.send(MESSAGE)
        donor.send_raw([memoryview(b"ab"), memoryview(b""), memoryview(b"c")])
        assert donor.receive(LIMIT) == {"number": number}
        assert joiner.receive(LIMIT) == MESSAGE
        into = bytearray(3)
        joiner.receive_raw(memoryview(into))
        assert into == b"abc"


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"[" * 900, b"9" * 900])
def test_messages_that_are_no_dicts(ends, text):
    joiner, donor = ends
    joiner.send_text(text)
    with pytest.raises(TransportError, match="it sent a message that is not"):
        donor.receive(LIMIT)


def test_10000_mutated_messages_are_refused_and_cost_no_memory():
    random, refused = Random(0), 0
    sender, receiver = socket.socketpair()
    with sender, receiver:
        Channel(sender, lambda: 10.0).send(MESSAGE)
        original = receiver.recv(LIMIT)
    streams = [mutate_bytes(original, random)[:10_000] for _ in range(10_000)]
    tracemalloc.start()
    try:
        for stream in streams:
            sender, receiver = socket.socketpair()
            with sender, receiver:
                sender.sendall(stream)
                sender.shutdown(socket.SHUT_WR)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                try:
                    assert isinstance(Channel(receiver, lambda: 10.0).receive(LIMIT), dict)
                except (TransportError, ConnectionError):
                    refused += 1
                assert tracemalloc.get_traced_memory()[1] - before < 20_000
    finally:
        tracemalloc.stop()
    assert 2000 < refused < 10_000
