"""A worker's end of the link, as its configuration describes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from isthmus.link import Link
from isthmus.transport.address import is_loopback, join_address, own_address, split_address
from isthmus.transport.trust import SECRET, Trust

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkOptions:
    """The options of a transport that belong to its worker's end of the link.

    Attributes:
        host: address of this machine to listen on; None: the one on its way to the rendezvous.
        port: to listen on; 0: any free one.
        announce: "host:port" at which the others reach that; None: what is listened on.
        identity: file with this worker's key.
        trusted: file with the fingerprints of all workers' keys.
    """

    host: str | None = None
    port: int = 0
    announce: str | None = None
    identity: str | None = None
    trusted: str | None = None

    NAMES = frozenset({"host", "port", "announce", "identity", "trusted"})  # each worker has its own


class LinkEnd(Link):
    """A link that lets in those whom the rendezvous names, as far as this worker trusts them.

    Args:
        options: of this worker.
        towards: a host on the way to the others.
        tick_seconds, patience_seconds: see `Link`.

    Raises:
        UserError: a key cannot be read, the address cannot be listened on.
    """

    def __init__(self, options: LinkOptions, towards: str, tick_seconds: float, patience_seconds: float) -> None:
        self.trust = trust = Trust(options.identity, options.trusted)
        self.named: list[str] = []  # fingerprints of those who take part
        if options.announce is not None:
            split_address(options.announce)
        host = options.host or own_address(towards)
        super().__init__(
            trust.identity, lambda: trust.among(self.named), host, options.port, tick_seconds, patience_seconds
        )
        self.announced = options.announce or join_address(*self.address)
        if trust.is_open and not is_loopback(host):
            _LOGGER.warning(
                "whoever can write at the rendezvous can take part: set %s everywhere, or outer.transport.identity "
                "and outer.transport.trusted",
                SECRET,
            )
