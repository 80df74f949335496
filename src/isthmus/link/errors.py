"""The errors of the link."""

from __future__ import annotations

from collections.abc import Sequence


class Misbehaviour(Exception):
    """A peer does not keep to the rules of the link: its connections are closed."""


class MemberLost(Exception):
    """Members of a group are gone, or do not answer: the group is closed. The message names them, and says why."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
