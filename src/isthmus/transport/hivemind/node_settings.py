"""The settings of a libp2p node, their checks, and the errors where they do not work."""

from __future__ import annotations

import errno
import fcntl
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hivemind.p2p import P2P, PeerID  # type: ignore[import-untyped]
from hivemind.utils.multiaddr import Multiaddr  # type: ignore[import-untyped]

from isthmus.core.types import UserError

_LOCK_SECONDS = 2.0


@dataclass(frozen=True)
class NodeSettings:
    """The addresses, keys and peers of a node; an address or a peer id that cannot be one is a `UserError`."""

    identity_path: Path  # the key behind the peer id; made where there is none
    initial_peers: Sequence[str] = ()  # multiaddrs with /p2p/<peer id>; none: this is the first
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddrs
    announce: Sequence[str] = ()  # multiaddrs under which the others reach this node; none: where it listens
    allowed_peers: Collection[str] | None = None  # peer ids; None: everybody
    relay: bool = False  # behind a NAT or firewall: be reached through other peers

    def __post_init__(self) -> None:
        for address in [*self.initial_peers, *self.listen, *self.announce]:
            try:
                Multiaddr(address)
            except Exception as error:
                raise UserError(f"{address!r} is no multiaddr: write /ip4/10.0.0.1/tcp/4001/p2p/Qm..., say") from error
        for address in self.initial_peers:
            if not is_peer_id(address.rpartition("/p2p/")[2]):
                raise UserError(f"initial peer {address} lacks its peer id: copy the line that isthmus dht prints")
        for peer_id in self.allowed_peers or ():
            if not is_peer_id(peer_id):
                raise UserError(f"allowed peer {peer_id!r} is no peer id: it looks like QmaLzwZ... or 12D3Koo...")

    def trusts(self, peer_id: str) -> bool:
        """Return whether a peer may speak to this one at all: it may take part, or is an initial peer."""
        return self.admits(peer_id) or self.is_initial(peer_id)

    def is_initial(self, peer_id: str) -> bool:
        """Return whether a peer is one of the initial peers."""
        return any(address.endswith(f"/p2p/{peer_id}") for address in self.initial_peers)

    def admits(self, peer_id: str) -> bool:
        """Return whether a peer may take part in a sync."""
        return self.allowed_peers is None or peer_id in self.allowed_peers


class PortInUse(UserError):
    """A port is in use, perhaps only until the daemon of a killed worker is gone."""


def is_peer_id(text: str) -> bool:
    """Return whether a text is the id of a libp2p peer."""
    try:
        return len(PeerID.from_base58(text).to_bytes()) in (34, 38)  # a hash of an RSA key, or an Ed25519 key
    except ValueError:
        return False


def check_ports(listen: Iterable[str]) -> None:
    """Refuse ports of other processes: libp2p would share them, and half the connections would end there."""
    for address in listen:
        _, family, host, *rest = address.split("/")
        if family in ("ip4", "ip6") and rest[:1] == ["tcp"]:
            with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, int(rest[1])))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise PortInUse(f"port {rest[1]} is in use on this machine: choose another") from error
                    raise


def lock_identity(path: Path) -> IO[bytes]:
    """Make the key where there is none, and lock it, so that no second process goes by the same peer id.

    A killed process holds its lock until the last of its threads has ended, so this waits for a moment.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            P2P.generate_identity(str(path))
        identity = path.open("rb")
        is_locked = _lock_in_time(identity)
    except OSError as error:
        raise UserError(f"identity {path} cannot be used ({error.strerror}): choose another place") from error
    if not is_locked:
        raise UserError(f"identity {path} is in use: each worker needs one of its own")
    try:
        PeerID.from_identity(identity.read())
    except Exception as error:
        raise UserError(
            f"identity {path} is damaged: delete it, and a new one is made (with another peer id)"
        ) from error
    return identity


def _lock_in_time(file: IO[bytes]) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def describe_failure(error: Exception, settings: NodeSettings, seconds: float) -> UserError:
    """Return what to do about a node that could not start or join."""
    text = str(error)
    if "failed to listen" in text or "assign requested address" in text:
        return UserError(f"cannot listen on {', '.join(settings.listen)}: are these addresses of this machine?")
    if "local time" in text:
        return UserError("this machine's clock differs from its peers' by more than 3 s: set it by NTP")
    if "access this node" in text:
        return UserError(
            "the other peers cannot connect to this one: open its port and set announce to its public multiaddr, "
            "or set relay to true"
        )
    if settings.initial_peers:
        return UserError(
            f"no initial peer answered for {seconds:g} s ({', '.join(settings.initial_peers)}): is isthmus dht running "
            "there, does the firewall let this port through, and is this worker's key trusted there?"
        )
    return UserError(f"the libp2p daemon does not start: {text.splitlines()[-1] if text else type(error).__name__}")
