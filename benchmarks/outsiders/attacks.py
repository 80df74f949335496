"""The attacks: each takes an address and a time, does its worst, and returns the bytes that it was told in the clear.

Bytes of TLS handshakes do not count: they are the same for everybody who knocks.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from isthmus.link import Identity
from isthmus.link.lane import HELLO, Frame
from isthmus.transport.torchft.lighthouse import import_torchft

Address = tuple[str, int]
Attack = Callable[[Address, float], int]
_TIMEOUT_SECONDS = 1.0
_PAUSE_SECONDS = 0.02


def silent(num_connections: int) -> Attack:
    """Connect, and say nothing."""

    def attack(address: Address, seconds: float) -> int:
        connections = [_connect(address) for _ in range(num_connections)]
        time.sleep(seconds)
        for connection in connections:
            if connection is not None:
                connection.close()
        return 0

    return attack


def junk(address: Address, seconds: float) -> int:
    """Send what is no handshake, again and again."""
    return _again(address, seconds, lambda connection: connection.sendall(os.urandom(1 << 16)))


def giant_lengths(address: Address, seconds: float) -> int:
    """Announce as much as a header can say: of TLS, and of a frame without TLS."""
    headers = [b"\x16\x03\x01\xff\xff", Frame(HELLO, (1 << 32) - 1).pack(), b"\xff" * 64]

    def send(connection: socket.socket) -> None:
        connection.sendall(headers[int(time.monotonic() * 1000) % len(headers)] + bytes(1 << 16))

    return _again(address, seconds, send)


def slow_handshake(address: Address, seconds: float) -> int:
    """Send half a handshake, one byte a second, on as many connections as are waited for."""
    hello = client_hello()
    end, connections = time.monotonic() + seconds, [_connect(address) for _ in range(64)]
    for byte in hello[: len(hello) // 2]:
        for connection in connections:
            with suppress(OSError):
                if connection is not None:
                    connection.sendall(bytes([byte]))
        if time.monotonic() > end:
            break
        time.sleep(1.0)
    for connection in connections:
        if connection is not None:
            connection.close()
    return 0


def replay(recorded: bytes) -> Attack:
    """Send once more what a worker sent: its handshake, and what it asked for."""
    return lambda address, seconds: _again(address, seconds, lambda connection: connection.sendall(recorded))


def with_key(identity: Identity, workers: list[str], newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> Attack:
    """Come with a key, and ask for the state."""

    def attack(address: Address, seconds: float) -> int:
        context = identity.tls_context(workers, server=False)
        if newest is not ssl.TLSVersion.TLSv1_3:
            context.minimum_version = context.maximum_version = newest
        return _again(address, seconds, lambda connection: _ask(connection, context, {"service": "state"}))

    return attack


def bad_member(identity: Identity, workers: list[str]) -> Attack:
    """Come with a trusted key, for groups and services that there are not."""
    hellos: list[Any] = [
        {"service": "nothing of the kind"},
        {"group": "stranger's", "rank": 1 << 62, "lane": 0, "num_lanes": 1},
        {"group": ["no", "text"], "rank": -1, "lane": -1, "num_lanes": 10**9},
        "no mapping",
    ]

    def attack(address: Address, seconds: float) -> int:
        context, kept, end = identity.tls_context(workers, server=False), [], time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            hello = hellos[number % len(hellos)]
            if isinstance(hello, dict) and "rank" in hello and isinstance(hello["group"], str):
                hello = hello | {"group": f"stranger's {number}"}
            connection, number = _connect(address), number + 1
            if connection is not None:
                with suppress(OSError):
                    kept.append(_secure(connection, context, hello))
        for each in kept:
            each.close()
        return 0

    return attack


def at_the_lighthouse(names: list[str], data: list[Any], kill: bool = False) -> Attack:
    """Write under other workers' names: heartbeats, and requests for a quorum with what a worker never tells."""

    def attack(address: Address, seconds: float) -> int:
        place = f"http://{address[0]}:{address[1]}"
        client = import_torchft().LighthouseClient(place, timedelta(seconds=_TIMEOUT_SECONDS))
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            name, told, number = names[number % len(names)], data[number % len(data)], number + 1
            with suppress(RuntimeError, TimeoutError, ValueError, TypeError):
                if kill:
                    _post(f"{place}/replica/{name}/kill")
                client.quorum(name, timedelta(seconds=0.05), store_address="198.51.100.1:1", data=told)
        return 0

    return attack


def fake_members(num_members: int) -> Attack:
    """Let the lighthouse believe that many more are alive, who never come."""

    def attack(address: Address, seconds: float) -> int:
        client = import_torchft().LighthouseClient(
            f"http://{address[0]}:{address[1]}", timedelta(seconds=_TIMEOUT_SECONDS)
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for number in range(num_members):
                with suppress(RuntimeError, TimeoutError):
                    client.heartbeat(f"stranger-{number}", timedelta(seconds=_TIMEOUT_SECONDS))
        return 0

    return attack


def client_hello() -> bytes:
    """Return the first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    context = Identity.generate().tls_context([], server=False)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def record(identity: Identity, workers: list[str], address: Address) -> bytes:
    """Return all that a worker sends when it asks another one for its state."""
    context = identity.tls_context(workers, server=False)
    incoming, outgoing, sent = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    secure = context.wrap_bio(incoming, outgoing)
    with socket.create_connection(address, _TIMEOUT_SECONDS) as connection:
        for _ in range(10):
            try:
                secure.do_handshake()
            except ssl.SSLWantReadError:
                part = outgoing.read()
                sent += part
                connection.sendall(part)
                incoming.write(connection.recv(1 << 16))
            else:
                break
        secure.write(_hello({"service": "state"}))
        part = outgoing.read()
        connection.sendall(part)
        return sent + part


def _again(address: Address, seconds: float, act: Callable[[socket.socket], object]) -> int:
    """Connect and act, again and again; return how many bytes came in the clear, or under TLS to whoever acts."""
    end, num_bytes = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        connection = _connect(address)
        if connection is not None:
            with suppress(OSError), connection:
                num_bytes += act(connection) or 0  # type: ignore[operator]
        time.sleep(_PAUSE_SECONDS)
    return num_bytes


def _ask(connection: socket.socket, context: ssl.SSLContext, hello: Any) -> int:
    with _secure(connection, context, hello) as secure:
        num_bytes = 0
        while part := secure.recv(1 << 16):
            num_bytes += len(part)
        return num_bytes


def _secure(connection: socket.socket, context: ssl.SSLContext, hello: Any) -> ssl.SSLSocket:
    secure = context.wrap_socket(connection)
    secure.sendall(_hello(hello))
    return secure


def _hello(hello: Any) -> bytes:
    payload = json.dumps(hello).encode()
    return Frame(HELLO, len(payload)).pack() + payload


def _connect(address: Address) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection(address, _TIMEOUT_SECONDS)
    return None


def _post(url: str) -> None:
    with suppress(urllib.error.URLError, OSError):
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=_TIMEOUT_SECONDS).close()
