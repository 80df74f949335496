"""A first peer, at which workers find one another, and a relay for those behind a NAT."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.node_settings import NodeSettings

_START_SECONDS = 60.0


@contextmanager
def first_peer(identity: Path) -> Iterator[list[str]]:
    """Run a first peer for workers on this machine; yields its addresses."""
    node = Node(NodeSettings(identity, listen=("/ip4/127.0.0.1/tcp/0",)))
    try:
        node.start(_START_SECONDS)
        yield node.call(node.addresses())
    finally:
        node.stop()


def serve_dht(
    listen: Sequence[str],
    identity: Path,
    initial_peers: Sequence[str] = (),
    announce: Sequence[str] = (),
    allowed_peers: Sequence[str] | None = None,
    connect_seconds: float = 60.0,
) -> None:
    """Be a peer of the swarm that trains nothing, until Ctrl-C or SIGTERM; say what the workers need.

    Args:
        listen: multiaddrs to listen on.
        identity: file of the peer's key; made where there is none. The address holds its hash, so keep it.
        initial_peers: multiaddrs of others like this; none: this is the first.
        announce: multiaddrs under which the workers reach this peer; none: those it listens on.
        allowed_peers: peer ids that may speak to it; None: everybody.
        connect_seconds: how long to look for the initial peers.

    Raises:
        UserError: a port is in use, no initial peer answers, or an address cannot be one.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    allowed = None if allowed_peers is None else frozenset(allowed_peers)
    node = Node(NodeSettings(identity, tuple(initial_peers), tuple(listen), tuple(announce), allowed))
    try:
        node.start(connect_seconds)
        addresses = node.call(node.addresses())
        remote = [address for address in addresses if not address.startswith(("/ip4/127.", "/ip6/::1/"))] or addresses
        print("dht: a first peer at " + ", ".join(addresses))
        print(f"     workers join it with --set outer.transport.initial_peers=[{','.join(remote)}]")
        print("     Ctrl-C ends it", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        node.stop()
        signal.signal(signal.SIGTERM, before)
