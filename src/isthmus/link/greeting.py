"""The first words on a connection: one end says what it comes for, the other one lets it in."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress
from typing import Any

from isthmus.link.group import Member
from isthmus.link.identity import fingerprint_of
from isthmus.link.lane import HELLO, Frame

HANDSHAKE_SECONDS = 5.0
WELCOME = b"\n"


def introduce(
    connection: socket.socket, member: Member, context: ssl.SSLContext, purpose: dict[str, Any]
) -> ssl.SSLSocket:
    """Return the connection when its other end has proved its key, and has let this worker in.

    Raises:
        OSError: it has not.
    """
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection = context.wrap_socket(connection)
        if member.fingerprint not in ("", fingerprint_of(connection)):
            raise ConnectionRefusedError("whoever answers there holds another key")
        payload = json.dumps({"to": member.id, **purpose}).encode()
        connection.sendall(Frame(HELLO, len(payload)).pack() + payload)
        read(connection, len(WELCOME))
    except BaseException:
        connection.close()
        raise
    return connection


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes."""
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def end(connection: socket.socket) -> None:
    """End a connection on which a thread waits."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would go on in the clear


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel look after a connection on which nothing crosses for long: NATs forget what is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
