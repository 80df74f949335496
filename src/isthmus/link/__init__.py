"""The link between workers: encrypted, authenticated, over several connections, closed at once when it is given up."""

from isthmus.link.errors import MemberLost
from isthmus.link.group import Group, Member
from isthmus.link.identity import Identity
from isthmus.link.link import Link

__all__ = ["Group", "Identity", "Link", "Member", "MemberLost"]
