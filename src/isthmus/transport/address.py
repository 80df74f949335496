"""Network addresses: as people write them, this machine's own, and ports of its."""

from __future__ import annotations

import re
import secrets
import socket
from contextlib import suppress

from isthmus.core.types import UserError

_OWN_PORTS = range(20_000, 32_768)
EVERYWHERE = ("", "0.0.0.0", "::")  # what a host to listen on may be: all addresses of this machine
INTERNET = "192.0.2.1"  # an address in no network: the way to it is the way out


def split_address(address: str) -> tuple[str, int]:
    """Split 'host:port', an IPv6 host in brackets, into host and port.

    Raises:
        UserError: the text is no address.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise UserError(f"{address!r} is no address: write host:port, say 10.0.0.5:29510")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Return host and port as one text: the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(towards: str = INTERNET) -> str:
    """Return this machine's address on its way to another host, loopback where there is no way; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def resolve(name: str, advice: str = "correct it") -> str:
    """Return the address of a host.

    Raises:
        UserError: it has none; the line ends with `advice`.
    """
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        raise UserError(f"the name {name} has no address ({error.strerror}): {advice}") from error


def is_loopback(address: str) -> bool:
    """Return whether only this very machine reaches the address."""
    return address.startswith("127.") or address == "::1"


def listening_for(address: str) -> str:
    """Return what to listen on so that others reach this machine at an address: loopback for that, else all there is.

    All, because a machine may be reached at an address that is not its own (a cloud's, a NAT's).
    """
    if is_loopback(address):
        return address
    return "::" if ":" in address else "0.0.0.0"


def check_port(port: int) -> None:
    """Raise a `UserError` where this machine cannot listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise UserError(
                f"this machine cannot listen on port {port} ({error.strerror}): set MASTER_PORT to a free one"
            ) from error


def free_port() -> int:
    """Return a port of this machine below those that the system gives away, so that it stays free until it is used."""
    while True:
        port = secrets.choice(_OWN_PORTS)  # whoever seeds `random` alike must not get the same one
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
