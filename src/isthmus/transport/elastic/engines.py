"""Elastic worlds as a configuration names them: `outer.transport.type`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from isthmus.core.types import UserError
from isthmus.transport.address import own_address, split_address
from isthmus.transport.base import ReplicatedState
from isthmus.transport.elastic.election import Weighting
from isthmus.transport.elastic.ranks import place_in_worker, worker_number
from isthmus.transport.elastic.world import Elastic


def worker_name(ranks_per_worker: int = 1) -> str:
    """Of this worker: the same after a restart."""
    return f"worker-{worker_number(ranks_per_worker)}"


def _token(identity: dict[str, str] | None) -> str:
    """A state is handed to workers of the same configuration only."""
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


class OverTorchFT(Elastic):
    """An elastic world over torchft's lighthouse.

    Args:
        lighthouse: its address, host:port, as `isthmus lighthouse` prints it; `isthmus launch` starts one of its own.
        min_workers: with fewer nobody commits; None: more than half of `expected_workers`, so that the halves of a cut
            network cannot both go on.
        weighting: each worker's share in the mean.
        sync_budget_seconds: bound on one attempt at a sync; all other timeouts follow from it.
        grace_seconds: how long a majority that has come to a sync waits for the others that are alive. It is the
            lighthouse that waits: this one is for the lighthouse that `isthmus launch` starts, and one of your own goes
            by `isthmus lighthouse --grace-seconds`.
        host: how the other workers reach this machine; None: the address from which it reaches the lighthouse.
        identity: what all workers must share.
        expected_workers: how many a new run waits for.
        replicated_state: what moves with the commits.
        ranks_per_worker: one, or as many as the mesh of a worker has.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        min_workers: int | None = None,
        weighting: Weighting = "uniform",
        sync_budget_seconds: float = 60.0,
        grace_seconds: float = 5.0,
        host: str | None = None,
        identity: dict[str, str] | None = None,
        expected_workers: int | None = None,
        replicated_state: ReplicatedState | None = None,
        say: Callable[[str], None] = print,
        ranks_per_worker: int = 1,
    ) -> None:
        from isthmus.transport.torchft.engine import TorchFT

        if lighthouse is None:
            raise UserError(
                "outer.transport.lighthouse is missing: start one with isthmus lighthouse and give its address, "
                "or use isthmus launch, which starts one itself"
            )
        host, place = host or own_address(split_address(lighthouse)[0]), place_in_worker(ranks_per_worker)
        super().__init__(
            TorchFT(lighthouse, worker_name(ranks_per_worker), sync_budget_seconds, host, place),
            identity=identity,
            expected_workers=expected_workers,
            min_workers=min_workers,
            weighting=weighting,
            sync_budget_seconds=sync_budget_seconds,
            state_host=host,
            token=_token(identity),
            replicated_state=replicated_state,
            say=say,
            ranks_per_worker=ranks_per_worker,
        )


class OverHivemind(Elastic):
    """An elastic world without a master, over hivemind's DHT and libp2p.

    Args:
        initial_peers: addresses of peers that are there already, as `isthmus dht` prints them.
        run: name of the run in the DHT.
        identity_folder: where this worker keeps the key that makes its peer id; None: runs/identity, and in the run's
            folder where `isthmus launch` makes a swarm for it.
        allowed_peers: peer ids that may take part; None: any.
        listen: multiaddrs to listen on.
        announce: multiaddrs as the others see them; empty: those listened on.
        relay: let peers behind NAT be reached through others.
        min_workers: with fewer nobody commits; None: more than half of `expected_workers`, so that the halves of a cut
            network cannot both go on.
        weighting: each worker's share in the mean.
        sync_budget_seconds: bound on one attempt at a sync; all other timeouts follow from it.
        grace_seconds: how long a majority that has come to a sync waits for the others that are alive.
        host: how the other workers reach this machine, to catch up; None: the address from which it reaches the
            first initial peer.
        identity: what all workers must share.
        expected_workers: how many a new run waits for.
        replicated_state: what moves with the commits.
        ranks_per_worker: one, or as many as the mesh of a worker has.
    """

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
        identity: dict[str, str] | None = None,
        expected_workers: int | None = None,
        replicated_state: ReplicatedState | None = None,
        say: Callable[[str], None] = print,
        ranks_per_worker: int = 1,
    ) -> None:
        from isthmus.transport.hivemind.engine import Hivemind

        name, place = worker_name(ranks_per_worker), place_in_worker(ranks_per_worker)
        key = f"{name}-rank-{place}.key" if place else f"{name}.key"
        engine = Hivemind(
            name,
            run,
            Path(identity_folder or "runs/identity") / key,
            initial_peers,
            allowed_peers,
            listen,
            announce,
            relay,
            sync_budget_seconds,
            grace_seconds,
            place=place,
        )
        super().__init__(
            engine,
            identity=identity,
            expected_workers=expected_workers,
            min_workers=min_workers,
            weighting=weighting,
            sync_budget_seconds=sync_budget_seconds,
            state_host=host or _address_towards(initial_peers),
            token=_token(identity),
            replicated_state=replicated_state,
            say=say,
            ranks_per_worker=ranks_per_worker,
        )


def _address_towards(peers: tuple[str, ...]) -> str:
    """This machine's address on its way to the first of these multiaddrs (/ip4/HOST/...)."""
    return own_address(peers[0].split("/")[2]) if peers else own_address()
