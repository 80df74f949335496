"""A first peer, at which workers find one another, and a relay for those behind a NAT."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.core.types import UserError
from isthmus.signals import handled_by
from isthmus.transport.address import listening_for
from isthmus.transport.hivemind.libp2p import Node
from isthmus.transport.hivemind.node_settings import NodeSettings
from isthmus.transport.trust import Trust

_START_SECONDS = 60.0  # to look for the initial peers


@contextmanager
def first_peer(identity: Path, address: str, port: int) -> Iterator[list[str]]:
    """Run a first peer for workers that reach this machine at an address; yields where its peer is."""
    family = "ip6" if ":" in address else "ip4"
    listen = f"/{family}/{listening_for(address)}/tcp/{port}"
    announce = (f"/{family}/{address}/tcp/{port}",) if port else ()
    node = Node(NodeSettings(identity, listen=(listen,), announce=announce))
    try:
        node.start(Trust(), _START_SECONDS)
        yield node.call(node.addresses())
    finally:
        node.stop()


def serve_dht(settings: NodeSettings, key: str | None = None, trusted: str | None = None) -> None:
    """Be a peer of the swarm that trains nothing, until Ctrl-C or SIGTERM; say what the workers need.

    With a key and a list of those that are trusted, or the run's secret, it answers nobody else.
    """
    if (key is None) != (trusted is None):
        raise UserError("give both --key and --trusted, or the run's secret, or none of them")
    trust = Trust(key, trusted)
    with handled_by(signal.default_int_handler):
        node = Node(settings)
        try:
            node.start(trust, _START_SECONDS)
            addresses = node.call(node.addresses())
            remote = [
                address for address in addresses if not address.startswith(("/ip4/127.", "/ip6/::1/"))
            ] or addresses
            print("dht: a first peer at " + ", ".join(addresses))
            print(f"     workers join it with --set outer.transport.initial_peers=[{','.join(remote)}]")
            print("     Ctrl-C ends it", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            node.stop()
