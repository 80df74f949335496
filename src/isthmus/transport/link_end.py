"""A worker's end of the link, as its configuration describes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from isthmus.core.types import UserError
from isthmus.link import Link, Member
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
        via: "host:port" of an `isthmus relay`, or of a worker, by which the others reach this one behind its NAT.
    """

    host: str | None = None
    port: int = 0
    announce: str | None = None
    identity: str | None = None
    trusted: str | None = None
    via: str | None = None

    NAMES = frozenset({"host", "port", "announce", "identity", "trusted", "via"})  # each worker has its own

    def of_rank(self, rank: int) -> LinkOptions:
        """Return the options of a rank of a worker, whose ports follow one another where the first one is fixed."""
        announce = self.announce
        if announce is not None:
            host, port = split_address(announce)
            announce = join_address(host, port + rank)
        return replace(self, port=self.port and self.port + rank, announce=announce)


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
        if options.via is not None and trust.is_open:
            raise UserError(
                f"outer.transport.via: a relay asks for a key: set {SECRET} everywhere, or outer.transport.identity "
                "and outer.transport.trusted"
            )
        host = options.host or own_address(towards)
        super().__init__(
            trust.identity,
            lambda: trust.among(self.named),
            host,
            options.port,
            tick_seconds,
            patience_seconds,
            via=None if options.via is None else split_address(options.via),
            trusted_relays=trust.everybody,
        )
        self.announced = options.announce or join_address(*self.address)
        if trust.is_open and not is_loopback(host):
            _LOGGER.warning(
                "whoever can write at the rendezvous can take part: set %s everywhere, or outer.transport.identity "
                "and outer.transport.trusted",
                SECRET,
            )

    @property
    def place(self) -> dict[str, str | None]:
        """What the others are told: how this link is reached, and the key that it holds."""
        via = None if self.via is None else join_address(*self.via)
        return {"address": self.announced, "key": self.identity.fingerprint, "id": self.id, "via": via}


def member_at(place: dict[str, Any], name: str, number: int = 0) -> Member:
    """Return as a member of a group whoever told this place; see `LinkEnd.place`."""
    via = None if place["via"] is None else split_address(place["via"])
    return Member(number, name, split_address(place["address"]), place["key"], place["id"], via)
