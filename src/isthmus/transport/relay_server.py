"""A link without a worker, at which workers meet that nobody can reach."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from isthmus.core.types import UserError
from isthmus.link import Link
from isthmus.transport.address import EVERYWHERE, join_address, own_address, split_address
from isthmus.transport.trust import SECRET, Trust


@contextmanager
def relay(bind: str, identity: str | None = None, trusted: str | None = None) -> Iterator[tuple[int, Trust]]:
    """Run a relay in this process, for as long as the context lasts.

    Args:
        bind: host:port to listen on; port 0 takes a free one.
        identity: the file of its key; None: the one of the run's secret.
        trusted: the file of all keys that it serves; None: it serves whoever knows the secret.

    Yields:
        Its port, and whom it serves.

    Raises:
        UserError: there is neither a secret nor a list, or the address cannot be listened on.
    """
    if (identity is None) != (trusted is None):
        raise UserError("a relay has a key and a list of those it serves: give both --identity and --trusted")
    trust = Trust(identity, trusted)
    if trust.is_open:
        raise UserError(f"a relay serves those it trusts: set {SECRET} as for the workers, or --identity and --trusted")
    host, port = split_address(bind)
    link = Link(trust.identity, trust.everybody, host, port)
    try:
        yield link.address[1], trust
    finally:
        link.close()


def serve_relay(bind: str, host: str | None = None, identity: str | None = None, trusted: str | None = None) -> None:
    """Run a relay as `relay` does until Ctrl-C or SIGTERM, and say what the workers need.

    They reach it at `host`; None: the address it listens on, or where that is everywhere, the address of its way to the
    internet.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # as many connections as this process may have
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # also for the link's threads
    try:
        with relay(bind, identity, trusted) as (port, trust):
            listens_on = split_address(bind)[0]
            reached = listens_on if listens_on not in EVERYWHERE else own_address()
            address = join_address(host or reached, port)
            print(f"relay: workers behind a NAT are reached with --set outer.transport.via={address}")
            if identity is not None:
                print(f"       a line for every worker's list of keys: {trust.identity.fingerprint}")
            print("       it cannot read what it passes on; Ctrl-C ends it", flush=True)
            signal.sigwait(signals)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
