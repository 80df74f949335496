"""Donors for the tests of healing: honest ones behind a link that misbehaves, and ones that lie."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.transport.heal.channel import Channel, shut_down
from isthmus.transport.heal.donor import StateServer
from isthmus.transport.heal.fetch import Dial
from isthmus.transport.heal.snapshot import Outgoing, Snapshot

CHUNK_BYTES = 1 << 16
NUM_CHUNKS = 32
_RECORD_HEADER, _HANDSHAKE_RECORDS = 5, 8  # bytes; records of TLS, from the donor
READY_BYTES = 4 + len('{"ready": true}')


def make_snapshot(seed: int = 0, name: str = "v1") -> Snapshot:
    """A state that fills `NUM_CHUNKS` chunks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUM_CHUNKS * CHUNK_BYTES // 4 - 25, generator=generator)
    return Snapshot(name, {"anchor": values, "momentum": torch.ones(5, 5), "outer_step": 3})


class Donor(StateServer):
    """A donor at a port of its own, in the clear: what passes can be counted and damaged."""

    def __init__(self, provide: Callable[[float], Snapshot], **options: Any) -> None:
        super().__init__(provide, lambda: self.version, chunk_bytes=CHUNK_BYTES, **options)
        self.version = 0  # of the state
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, name="isthmus-port", daemon=True).start()

    def close(self) -> None:
        shut_down(self._listener)
        super().close()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self.serve, args=[connection], name="isthmus-donor", daemon=True).start()


def dial(address: str, seconds: float) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), seconds)


def dials(*addresses: str) -> dict[str, Dial]:
    """Donors for `fetch`, by their addresses."""
    return {address: partial(dial, address) for address in addresses}


def serve_until_killed(rank: int, folder: str) -> None:
    """A donor in a process of its own."""
    donor = Donor(lambda seconds: make_snapshot())
    Path(folder, "new").write_text(donor.address)
    Path(folder, "new").rename(Path(folder, "address"))
    threading.Event().wait()


def manifest_end(snapshot: Snapshot) -> int:
    """Bytes that a donor has sent when the manifest is complete."""
    return READY_BYTES + 4 + len(Outgoing(snapshot, CHUNK_BYTES).manifest)


def middle_of_chunk(number: int, snapshot: Snapshot) -> int:
    """Bytes that a donor has sent when it is in the middle of its n-th chunk, from 0."""
    return manifest_end(snapshot) + number * (READY_BYTES + CHUNK_BYTES) + READY_BYTES + CHUNK_BYTES // 2


class Relay:
    """A link to a donor at which something happens once, after `after_bytes` have come from the donor.

    `event` gets the rest of that piece and returns what is passed on; it may block, and closes the link by raising
    `ConnectionError`.
    """

    def __init__(self, target: str, after_bytes: int, event: Callable[["Relay", bytes], bytes]) -> None:
        self.num_connections = 0
        self.passed = bytearray()  # all that has come from the donor
        self.happened, self.closed = threading.Event(), threading.Event()
        self._target, self._after_bytes, self._event = target, after_bytes, event
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.address = "127.0.0.1:{1}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No connection from here on; the present ones end."""
        self.closed.set()
        for end in [self._listener, *self._ends]:
            shut_down(end)

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                joiner, _ = self._listener.accept()
                host, port = self._target.split(":")
                donor = socket.create_connection((host, int(port)))
                self.num_connections += 1
                self._ends += [joiner, donor]
                for source, sink, edit in [(joiner, donor, bytes), (donor, joiner, self._edit)]:
                    threading.Thread(target=self._pump, args=[source, sink, edit], daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send the joiner of the newest connection something."""
        self._ends[-2].sendall(data)

    def _pump(self, source: socket.socket, sink: socket.socket, edit: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                sink.sendall(edit(data))
        for end in (source, sink):
            shut_down(end)

    def _edit(self, data: bytes) -> bytes:
        before = len(self.passed)
        self.passed += data
        if self.happened.is_set() or len(self.passed) <= self._after_bytes:
            return data
        self.happened.set()
        split = self._after_bytes - before
        return data[:split] + self._event(self, data[split:])


class SlowRecords(Relay):
    """A way on which each record of TLS takes so long, once the handshake is done."""

    def __init__(self, target: str, seconds: float) -> None:
        super().__init__(target, 0, lambda relay, rest: rest)
        self._seconds, self._rest, self._num_records = seconds, b"", 0

    def _edit(self, data: bytes) -> bytes:
        self._rest += data
        while len(self._rest) >= _RECORD_HEADER and len(self._rest) >= (size := self._record_bytes()):
            self._num_records += 1
            if self._num_records > _HANDSHAKE_RECORDS:
                self.closed.wait(self._seconds)
            self.send(self._rest[:size])
            self._rest = self._rest[size:]
        return b""

    def _record_bytes(self) -> int:
        return _RECORD_HEADER + int.from_bytes(self._rest[3:_RECORD_HEADER], "big")


def die(relay: Relay, rest: bytes) -> bytes:
    """The donor is gone for good."""
    relay.close()
    raise ConnectionError


def break_once(relay: Relay, rest: bytes) -> bytes:
    """This connection ends; another may begin."""
    raise ConnectionError


def stall(relay: Relay, rest: bytes) -> bytes:
    """Nothing comes any more."""
    relay.closed.wait()
    return rest


def flip(relay: Relay, rest: bytes) -> bytes:
    """A byte is damaged."""
    return bytes([rest[0] ^ 1]) + rest[1:]


class Hostile:
    """A donor that says what the test wants; it ends with the first connection."""

    def __init__(self, script: Callable[[Channel], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._script = script
        self.address = "127.0.0.1:{1}".format(*self._listener.getsockname())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listener:
            connection, _ = self._listener.accept()
        with connection, suppress(OSError):
            channel = Channel(connection, lambda: 30.0)
            channel.receive(4096)
            self._script(channel)
            while connection.recv(4096):
                pass  # until the joiner hangs up
