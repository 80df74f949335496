import socket
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from fuzzing import mutate_bytes

from isthmus.transport import TransportError
from isthmus.transport.heal.channel import Channel

KEY = bytes(32)
LIMIT = 1000
MESSAGE = {"ready": True, "text": "é" * 20, "numbers": [1, 2.5, None]}


def patience() -> float:
    return 10.0


@pytest.fixture
def sockets():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def shake(sockets, joiner_token="secret", donor_token="secret"):
    with ThreadPoolExecutor(2) as threads:
        joiner = threads.submit(Channel.connect, sockets[0], joiner_token, patience)
        donor = threads.submit(Channel.accept, sockets[1], donor_token, patience)
        return joiner.exception() or joiner.result(), donor.exception() or donor.result()


def ends(sockets):
    """Both ends, the handshake done."""
    return (
        Channel(sockets[0], KEY, patience, b"joiner", b"donor"),
        Channel(sockets[1], KEY, patience, b"donor", b"joiner"),
    )


def test_messages_and_raw_bytes_in_order(sockets):
    joiner, donor = shake(sockets)
    for number in range(3):
        joiner.send({"number": number})
        donor.send(MESSAGE)
        donor.send_raw([memoryview(b"ab"), memoryview(b""), memoryview(b"c")])
        assert donor.receive(LIMIT) == {"number": number}
        assert joiner.receive(LIMIT) == MESSAGE
        into = bytearray(3)
        joiner.receive_raw(memoryview(into))
        assert into == b"abc"


def test_another_token_is_refused_by_both(sockets):
    joiner, donor = shake(sockets, donor_token="another")
    assert isinstance(joiner, TransportError)
    assert isinstance(donor, TransportError)


def test_something_else_at_that_port(sockets):
    sockets[1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(100))
    with pytest.raises(TransportError, match="no isthmus worker"):
        Channel.connect(sockets[0], "secret", patience)


def frame(sockets, number=0) -> bytes:
    """The bytes of the joiner's message after `number` others."""
    joiner, _ = ends(sockets)
    for _ in range(number + 1):
        joiner.send(MESSAGE)
        sent = sockets[1].recv(LIMIT)
    return sent


def test_a_message_cannot_be_replayed(sockets):
    sent = frame(sockets)
    _, donor = ends(sockets)
    sockets[0].sendall(sent + sent)
    assert donor.receive(LIMIT) == MESSAGE
    with pytest.raises(TransportError, match="wrong checksum"):
        donor.receive(LIMIT)


def test_a_message_cannot_overtake_another(sockets):
    sent = frame(sockets, number=1)
    _, donor = ends(sockets)
    sockets[0].sendall(sent)
    with pytest.raises(TransportError, match="wrong checksum"):
        donor.receive(LIMIT)


def test_a_message_cannot_be_sent_back_to_its_sender(sockets):
    sent = frame(sockets)
    joiner, _ = ends(sockets)
    sockets[1].sendall(sent)
    with pytest.raises(TransportError, match="wrong checksum"):
        joiner.receive(LIMIT)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"[" * 900, b"9" * 900])
def test_messages_that_are_no_dicts(sockets, text):
    joiner, donor = ends(sockets)
    joiner.send_text(text)
    with pytest.raises(TransportError, match="it sent a message that is not"):
        donor.receive(LIMIT)


def test_10000_mutated_messages_are_refused_and_cost_no_memory(sockets):
    random = Random(0)
    original = frame(sockets)
    streams = [mutate_bytes(original, random)[:10_000] for _ in range(10_000)]
    tracemalloc.start()
    refused = 0
    try:
        for stream in streams:
            sender, receiver = socket.socketpair()
            with sender, receiver:
                sender.sendall(stream)
                sender.shutdown(socket.SHUT_WR)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                try:
                    message = Channel(receiver, KEY, patience, b"donor", b"joiner").receive(LIMIT)
                except (TransportError, ConnectionError):
                    refused += 1
                else:
                    assert message == MESSAGE
                    assert stream.startswith(original)
                assert tracemalloc.get_traced_memory()[1] - before < 20_000
    finally:
        tracemalloc.stop()
    assert 5000 < refused < 10_000
