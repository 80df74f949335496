"""Ends of the link for workers of this machine, and what a worker tells of its own."""

from typing import Any

from isthmus.transport.elastic.member_info import MemberInfo
from isthmus.transport.elastic.membership import Membership
from isthmus.transport.link_end import LinkEnd, LinkOptions


def open_link(budget_seconds: float = 6.0, **options: Any) -> LinkEnd:
    """Open an end of the link as an elastic transport does."""
    options = {"host": "127.0.0.1"} | options
    seconds = min(0.5, budget_seconds / 20), min(10.0, budget_seconds / 3)
    return LinkEnd(LinkOptions(**options), "127.0.0.1", *seconds)


def info_of(membership: Membership, **more: Any) -> MemberInfo:
    """Return what a connected worker of one rank tells of itself."""
    link = {"address": membership.link.announced, "key": membership.link.identity.fingerprint}
    return {"links": [link], "contacts": [membership.contact], **more}
