"""Several ends of a link in this process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.link import Group, Identity, Link, Member


class Ends:
    """Links that trust one another, and groups of them."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.trusted: list[str] = []

    def add(self, num_links: int, patience_seconds: float = 5.0) -> list[Link]:
        for _ in range(num_links):
            identity = Identity.generate()
            self.trusted.append(identity.fingerprint)
            self.links.append(
                Link(identity, lambda: self.trusted, tick_seconds=0.05, patience_seconds=patience_seconds)
            )
        return self.links

    def members(self) -> list[Member]:
        return [
            Member(number, f"worker {number}", link.address, link.identity.fingerprint)
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
