"""The transport `hivemind`: an elastic world whose workers find one another in a DHT, without a server."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from isthmus.transport.address import INTERNET
from isthmus.transport.base import ReplicatedState
from isthmus.transport.configured import Finding
from isthmus.transport.elastic.election import Weighting
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.elastic.worker_ranks import worker_name, worker_number
from isthmus.transport.link_end import LinkOptions

_DIAL_SECONDS = 5.0


class HivemindTransport(ElasticTransport):
    """An elastic world without a master, whose workers find one another in hivemind's DHT.

    Args:
        initial_peers: addresses of peers that are there already, as `isthmus dht` prints them.
        run: name of the run in the DHT.
        identity_folder: where this worker keeps the key that makes its peer id; None: runs/identity, and in the run's
            folder where `isthmus launch` makes a swarm for it.
        allowed_peers: peer ids that may take part; None: any.
        listen: multiaddrs to listen on, for the DHT.
        announce: multiaddrs as the others see them, for the DHT; empty: those listened on.
        relay: let peers behind NAT be reached through others, for the DHT.
        grace_seconds: how long a majority that has come to a sync waits for the others that are alive.
        host, port, announce_link, identity, trusted, via: of the link, over which the workers sync and catch up; see
            `LinkOptions`.

    The other options are those of every `ElasticTransport`.
    """

    PRIVATE_OPTIONS = frozenset(
        {"initial_peers", "identity_folder", "listen", "announce", "relay"}
        | {"host", "port", "announce_link", "identity", "trusted", "via"}
    )

    def __init__(
        self,
        initial_peers: tuple[str, ...] = (),
        run: str = "isthmus",
        identity_folder: str | None = None,
        allowed_peers: tuple[str, ...] | None = None,
        listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",),
        announce: tuple[str, ...] = (),
        relay: bool = False,
        min_workers: int | None = None,
        weighting: Weighting = "uniform",
        sync_budget_seconds: float = 60.0,
        grace_seconds: float = 30.0,
        host: str | None = None,
        port: int = 0,
        announce_link: str | None = None,
        identity: str | None = None,
        trusted: str | None = None,
        via: str | None = None,
        shared_config: dict[str, str] | None = None,
        expected_workers: int | None = None,
        replicated_state: ReplicatedState | None = None,
        ranks_per_worker: int = 1,
        resumes: bool = False,
    ) -> None:
        # hivemind takes seconds to import, and may not be installed
        from isthmus.transport.hivemind.membership import HivemindMembership
        from isthmus.transport.hivemind.node_settings import NodeSettings

        name = worker_name(ranks_per_worker)
        key = Path(identity_folder or "runs/identity") / f"{name}.key"
        settings = NodeSettings(key, initial_peers, listen, announce, allowed_peers, relay)
        super().__init__(
            HivemindMembership(name, run, settings, grace_seconds),
            shared_config=shared_config,
            expected_workers=expected_workers,
            min_workers=min_workers,
            weighting=weighting,
            sync_budget_seconds=sync_budget_seconds,
            link_options=LinkOptions(host, port, announce_link, identity, trusted, via),
            towards=initial_peers[0].split("/")[2] if initial_peers else INTERNET,  # of /ip4/HOST/...
            replicated_state=replicated_state,
            ranks_per_worker=ranks_per_worker,
            resumes=resumes,
        )

    @override
    @classmethod
    @contextmanager
    def serve(
        cls, options: Mapping[str, Any], folder: Path, address: str = "127.0.0.1", port: int = 0
    ) -> Iterator[dict[str, Any]]:
        if options["initial_peers"]:
            yield {}
            return
        from isthmus.transport.hivemind.dht_server import first_peer

        keys = folder / "identity"
        with first_peer(keys / "first-peer.key", address, port) as addresses:
            yield {"initial_peers": addresses, "identity_folder": options["identity_folder"] or str(keys)}

    @override
    @classmethod
    def check(cls, options: Mapping[str, Any]) -> Iterator[Finding]:
        from isthmus.transport.hivemind.node_settings import NodeSettings, check_ports

        peers = options["initial_peers"]
        NodeSettings(Path(), peers, options["listen"], options["announce"], options["allowed_peers"])
        check_ports(options["listen"])
        if not peers and worker_number() > 0:
            advice = "start isthmus dht, and give its address in outer.transport.initial_peers"
            yield Finding("fail", "no initial peers are named", advice)
            return
        problems = {peer: problem for peer in peers if (problem := _dial(peer))}
        if problems and len(problems) == len(peers):
            found = "; ".join(f"{peer} ({problem})" for peer, problem in problems.items())
            advice = "start isthmus dht there, and let this machine reach its port"
            yield Finding("fail", f"no initial peer answers: {found}", advice)
        elif peers:
            yield Finding("ok", f"an initial peer answers, of {', '.join(peers)}")
        else:
            yield Finding("ok", "this worker is the first peer")

    @override
    @classmethod
    def apart_from_a_run(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "run": f"{options['run']}-doctor"}


def _dial(peer: str) -> str:
    """Say why no TCP connection to a multiaddr opens; empty where one does, or where it goes by other ways."""
    match peer.split("/")[1:5]:
        case ["ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port]:
            try:
                socket.create_connection((host, int(port)), _DIAL_SECONDS).close()
            except OSError as error:
                return error.strerror or str(error)
    return ""
