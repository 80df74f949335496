"""What the ranks of a run tell one another once and for all: keys that are set once, over the groups of a link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from isthmus.link import Group
from isthmus.transport.base import PeerLost


class Notes(Protocol):
    """Keys that any rank may set, once, and all of them see."""

    def set(self, key: str, value: str) -> None:
        """Set a key; whoever sees what this rank does from now on sees it, too."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""

    def get(self, key: str) -> str:
        """Return what a key is set to."""


class OwnNotes(Notes):
    """The notes of a rank that is alone."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    @override
    def set(self, key: str, value: str) -> None:
        self._notes[key] = value

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._notes for key in keys)

    @override
    def get(self, key: str) -> str:
        return self._notes[key]


class SharedNotes(Notes):
    """Notes that the members of a group, and of those bound to theirs, tell one another with their heartbeats.

    All calls raise `PeerLost` where the group is lost.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @override
    def set(self, key: str, value: str) -> None:
        self._check()
        self._group.share({key: value})

    @override
    def check(self, keys: Sequence[str]) -> bool:
        self._check()
        return all(key in self._group.notes for key in keys)

    @override
    def get(self, key: str) -> str:
        return self._group.notes[key]

    def _check(self) -> None:
        if self._group.lost is not None:
            raise PeerLost(self._group.lost.ranks, str(self._group.lost))
