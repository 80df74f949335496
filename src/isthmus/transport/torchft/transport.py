"""The transport `torchft`: an elastic world whose workers meet at a lighthouse."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.transport.address import join_address, listening_for, resolve, split_address
from isthmus.transport.base import ReplicatedState
from isthmus.transport.configured import Finding
from isthmus.transport.elastic.election import Weighting
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.elastic.worker_ranks import worker_name
from isthmus.transport.link_end import LinkOptions
from isthmus.transport.torchft.lighthouse import lighthouse as run_lighthouse

_DIAL_SECONDS = 5.0


class TorchFTTransport(ElasticTransport):
    """An elastic world over torchft's lighthouse.

    Args:
        lighthouse: its address, host:port, as `isthmus lighthouse` prints it; `isthmus launch` starts one of its own.
        grace_seconds: how long a majority that has come to a sync waits for the others that are alive. It is the
            lighthouse that waits: this one is for the lighthouse that `isthmus launch` starts, and one of your own goes
            by `isthmus lighthouse --grace-seconds`.
        host, port, announce, identity, trusted, via: see `LinkOptions`.

    The other options are those of every `ElasticTransport`.
    """

    PRIVATE_OPTIONS = LinkOptions.NAMES | {"lighthouse"}

    def __init__(
        self,
        lighthouse: str | None = None,
        min_workers: int | None = None,
        weighting: Weighting = "uniform",
        sync_budget_seconds: float = 60.0,
        grace_seconds: float = 5.0,
        host: str | None = None,
        port: int = 0,
        announce: str | None = None,
        identity: str | None = None,
        trusted: str | None = None,
        via: str | None = None,
        shared_config: dict[str, str] | None = None,
        expected_workers: int | None = None,
        replicated_state: ReplicatedState | None = None,
        ranks_per_worker: int = 1,
        resumes: bool = False,
    ) -> None:
        from isthmus.transport.torchft.membership import TorchFTMembership

        if lighthouse is None:
            raise UserError(
                "outer.transport.lighthouse is missing: start one with isthmus lighthouse and give its address, "
                "or use isthmus launch, which starts one itself"
            )
        super().__init__(
            TorchFTMembership(lighthouse, worker_name(ranks_per_worker), sync_budget_seconds),
            shared_config=shared_config,
            expected_workers=expected_workers,
            min_workers=min_workers,
            weighting=weighting,
            sync_budget_seconds=sync_budget_seconds,
            link_options=LinkOptions(host, port, announce, identity, trusted, via),
            towards=split_address(lighthouse)[0],
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
        if options["lighthouse"] is not None:
            yield {}
            return
        bind = join_address(listening_for(address), port)
        with run_lighthouse(bind, grace_seconds=options["grace_seconds"]) as listens_on:
            yield {"lighthouse": join_address(address, listens_on)}

    @override
    @classmethod
    def check(cls, options: Mapping[str, Any]) -> Iterator[Finding]:
        if options["lighthouse"] is None:
            advice = "start one with isthmus lighthouse, and give its address in outer.transport.lighthouse"
            yield Finding("fail", "no lighthouse is named", advice)
            return
        host, port = split_address(options["lighthouse"])
        address = resolve(host, "correct outer.transport.lighthouse")
        try:
            socket.create_connection((address, port), _DIAL_SECONDS).close()
            yield Finding("ok", f"a lighthouse answers at {address}, port {port}")
        except OSError as error:
            found = f"no lighthouse answers at {address}, port {port} ({error.strerror or error})"
            yield Finding("fail", found, "start isthmus lighthouse there, and let this machine reach that port")
