"""The commands of what stands beside workers: keys, the places where workers find one another, relays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Bind = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")]
_Host = Annotated[
    str | None,
    typer.Option(help="How the workers reach this machine.", show_default="its address on the way to the internet"),
]
_DHT_LISTEN = "/ip4/0.0.0.0/tcp/29520"


def identity(path: Annotated[Path, typer.Argument(help="The file of the key; one that is there stays.")]) -> None:
    """Make a worker's key, and print its fingerprint: a line for the file that outer.transport.trusted names."""
    from isthmus.link import Identity

    if not path.exists():
        Identity.generate().save(path)
    print(Identity.load(path).fingerprint)


def lighthouse(
    bind: _Bind = "0.0.0.0:29510",
    host: _Host = None,
    min_workers: Annotated[int, typer.Option(min=1, help="With fewer nobody meets.")] = 1,
    grace_seconds: Annotated[float, typer.Option(min=0, help="How long the first wait for those still alive.")] = 10,
) -> None:
    """Start a lighthouse, where the workers of an elastic run find one another (torchft)."""
    from isthmus.transport.torchft.lighthouse import serve_lighthouse

    serve_lighthouse(bind, min_workers, grace_seconds, host)


def dht(
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on.", show_default=_DHT_LISTEN)] = None,
    identity: Annotated[Path, typer.Option(help="The peer's key: its address stays the same.")] = Path("runs/dht.key"),
    initial_peers: Annotated[list[str] | None, typer.Option("--peer", help="Another peer to join.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddr as the workers see it.")] = None,
    allowed_peers: Annotated[list[str] | None, typer.Option("--allow", help="Peer id; all others are refused.")] = None,
    key: Annotated[str | None, typer.Option(help="A key of the run, as isthmus identity makes it.")] = None,
    trusted: Annotated[str | None, typer.Option(help="The file of all keys; no other peer is answered.")] = None,
) -> None:
    """Start a first peer, through which the workers of an elastic run find one another (hivemind)."""
    from isthmus.transport.hivemind.dht_server import serve_dht
    from isthmus.transport.hivemind.node_settings import NodeSettings

    listen = listen or [_DHT_LISTEN]
    settings = NodeSettings(identity, initial_peers or [], listen, announce or [], allowed_peers or None)
    serve_dht(settings, key, trusted)


def relay(
    bind: _Bind = "0.0.0.0:29530",
    host: _Host = None,
    identity: Annotated[str | None, typer.Option(help="The relay's key, as isthmus identity makes it.")] = None,
    trusted: Annotated[str | None, typer.Option(help="The file of all keys that it serves.")] = None,
) -> None:
    """Start a relay, by which workers reach one another that are all behind NATs; it cannot read what it passes on."""
    from isthmus.transport.relay_server import serve_relay

    serve_relay(bind, host, identity, trusted)
