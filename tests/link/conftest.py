"""Several ends of a link in this process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from isthmus.link import Group, Identity, Link, Member


class Ends:
    """Links that trust one another, and groups of them."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.trusted: list[str] = []
        self.hidden: dict[Link, tuple[str, int]] = {}  # who cannot be reached, and where the others look

    def add(self, num_links: int, patience_seconds: float = 5.0, **options: Any) -> list[Link]:
        for _ in range(num_links):
            identity = options.pop("identity", None) or Identity.generate()
            self.trusted.append(identity.fingerprint)
            self.links.append(
                Link(identity, lambda: self.trusted, tick_seconds=0.05, patience_seconds=patience_seconds, **options)
            )
        return self.links

    def members(self) -> list[Member]:
        return [
            Member(
                number,
                f"worker {number}",
                self.hidden.get(link, link.address),
                link.identity.fingerprint,
                link.id,
                link.via,
            )
            for number, link in enumerate(self.links)
        ]

    def open(self, name: str = "group", seconds: float = 10.0) -> list[Group]:
        members = self.members()
        return together([lambda r=r: self.links[r].open(name, members, r, seconds) for r in range(len(members))])


def together(calls):
    """The results of calls made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for link in made.links:
        link.close()
