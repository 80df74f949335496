"""What a frame carries arrives, and what is damaged, repeated or not due is refused."""

import asyncio
import random

import pytest
from fuzzing import mutate_bytes

from isthmus.transport import TransportError
from isthmus.transport.hivemind import frames
from isthmus.transport.hivemind.frames import Frame, Kind

RENDEZVOUS = bytes(range(20))
DUE = Frame(Kind.DATA, RENDEZVOUS, sender=3, collective=7)


def stream(*frame_and_payload):
    """What `frames.send` writes."""
    written = []

    class Writer:
        def write(self, data):
            written.append(bytes(data))

        async def drain(self):
            pass

    asyncio.run(frames.send(Writer(), *frame_and_payload))
    return b"".join(written)


async def read_all(data, into):
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    await frames.receive(reader, DUE, memoryview(into))
    return await reader.read()


def test_frames_carry_any_size(monkeypatch):
    monkeypatch.setattr(frames, "PAYLOAD_BYTES", 100)
    for size in (0, 1, 99, 100, 101, 250):
        payload = random.Random(size).randbytes(size)
        into = bytearray(size)
        assert asyncio.run(read_all(stream(DUE, memoryview(payload)), into)) == b""
        assert into == payload


def test_10000_mutated_streams_are_refused_and_write_nothing_beyond_the_buffer(monkeypatch):
    monkeypatch.setattr(frames, "PAYLOAD_BYTES", 100)
    dice = random.Random(0)
    payload = dice.randbytes(250)
    good = stream(DUE, memoryview(payload))
    refused = 0

    async def run():
        nonlocal refused
        for _ in range(10_000):
            bad = mutate_bytes(good, dice)
            guarded = bytearray(b"\xaa" * (len(payload) + 20))
            try:
                await read_all(bad, memoryview(guarded)[10:-10])
            except (TransportError, EOFError):
                refused += 1
            else:
                assert bad.startswith(good), "accepted only what is intact, whatever follows it"
                assert guarded[10:-10] == payload
            assert guarded[:10] == guarded[-10:] == b"\xaa" * 10

    asyncio.run(run())
    assert refused > 9000


@pytest.mark.parametrize(
    "change",
    [{"sender": 2}, {"rendezvous": bytes(20)}, {"collective": 6}, {"kind": Kind.HEARTBEAT}],
    ids=lambda change: next(iter(change)),
)
def test_a_frame_that_is_intact_but_not_due_is_refused(change):
    wrong = Frame(**{"kind": Kind.DATA, "rendezvous": RENDEZVOUS, "sender": 3, "collective": 7} | change)
    with pytest.raises(TransportError, match="not due: " + next(iter(change))):
        asyncio.run(read_all(stream(wrong, memoryview(b"x" * 10)), bytearray(10)))


def test_repeated_reordered_and_oversized_frames_are_refused(monkeypatch):
    monkeypatch.setattr(frames, "PAYLOAD_BYTES", 100)
    data = stream(DUE, memoryview(bytes(200)))
    half = len(data) // 2
    for bad in (data[:half] * 2, data[half:] + data[:half]):
        with pytest.raises(TransportError, match="not due: number"):
            asyncio.run(read_all(bad, bytearray(200)))
    huge = Frame(Kind.DATA, RENDEZVOUS, 3, 7, length=1 << 31).header()
    with pytest.raises(TransportError, match="not due: length 2147483648 for 100"):
        asyncio.run(read_all(huge, bytearray(200)))


def test_a_hello_cannot_make_the_listener_allocate():
    async def listen(data):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        return await frames.receive_any(reader, frames.TEXT_BYTES)

    with pytest.raises(TransportError, match="4294967295 bytes where 400 are allowed"):
        asyncio.run(listen(Frame(Kind.ABORT, RENDEZVOUS, 3, length=(1 << 32) - 1).header()))
