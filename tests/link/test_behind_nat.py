"""Links on hosts that nobody outside can reach: real firewalls and NATs, one key, and the same address behind each."""

import itertools

import pytest

from isthmus.link import Identity, Link, Member
from tests.hosts import Hosts, skip_where_there_are_none
from tests.link.test_link import exchange_all

pytestmark = [pytest.mark.processes, pytest.mark.waits]
KINDS = ["open", "filtered", "nat", "nat", "open"]
FIRST_FILTERED, FIRST_NAT, SECOND_NAT, RELAY = 1, 2, 3, 4


class Internet:
    """A link on each host, all with the key of one secret and the same port."""

    def __init__(self) -> None:
        self.hosts, self.names = Hosts(KINDS), (f"group {number}" for number in itertools.count())
        self.links: dict[int, Link] = {}
        try:
            for number in range(len(KINDS)):
                self.start(number)
        except BaseException:
            self.close()
            raise

    def start(self, number: int, via: tuple[str, int] | None = None) -> None:
        """Give a host a new link."""
        identity = Identity.from_secret("a secret of at least sixteen letters")
        options = {"tick_seconds": 0.1, "via": via}
        if number in self.links:
            self.links[number].close()
        self.links[number] = self.hosts.on(
            number, lambda: Link(identity, lambda: [identity.fingerprint], "0.0.0.0", 4000, **options)
        ).result()

    def members(self, numbers: list[int]) -> list[Member]:
        return [
            Member(
                rank,
                f"worker {rank}",
                (self.hosts.addresses[number], 4000),
                self.links[number].identity.fingerprint,
                self.links[number].id,
                self.links[number].via,
            )
            for rank, number in enumerate(numbers)
        ]

    def open(self, numbers: list[int]):
        """Return the groups of links on these hosts, in this order."""
        members, name = self.members(numbers), next(self.names)
        opening = [
            self.hosts.on(number, self.links[number].open, name, members, rank, 15.0)
            for rank, number in enumerate(numbers)
        ]
        return [future.result() for future in opening]

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.hosts.close()


@pytest.fixture(scope="module")
def internet():
    skip_where_there_are_none()
    each = Internet()
    yield each
    each.close()


def check(groups):
    size = len(groups)
    sent, came = exchange_all(groups, [[0 if i == j else 300_000 for j in range(size)] for i in range(size)])
    assert all(bytes(came[i][j]) == sent[j][i] for i in range(size) for j in range(size) if i != j)
    for group in groups:
        group.close()


@pytest.mark.parametrize("hidden", [FIRST_FILTERED, FIRST_NAT])
def test_of_two_links_one_needs_to_be_reachable_whichever_dials(internet, hidden):
    for numbers in ([0, hidden], [hidden, 0]):
        check(internet.open(numbers))
    hidden_link, open_link = internet.links[hidden], internet.links[0]
    hidden_link.serve("name", lambda connection: (connection.sendall(b"donor"), connection.close()))
    member = internet.members([hidden])[0]
    internet.hosts.on(hidden, hidden_link.register_at, internet.members([0])).result()
    with internet.hosts.on(0, open_link.call, member, "name", 10).result() as connection:
        assert connection.recv(5) == b"donor"


def test_of_three_links_one_needs_to_be_reachable(internet):
    for number in (FIRST_FILTERED, FIRST_NAT, SECOND_NAT):
        internet.start(number)  # nothing is known of the others, and nobody is registered
    check(internet.open([FIRST_NAT, FIRST_FILTERED, 0]))
    check(internet.open([0, FIRST_NAT, SECOND_NAT]))


def test_where_no_link_can_be_reached_a_relay_helps(internet):
    numbers = [FIRST_NAT, SECOND_NAT, FIRST_FILTERED]
    for number in numbers:
        internet.start(number, via=(internet.hosts.addresses[RELAY], 4000))
    check(internet.open(numbers))
    internet.links[FIRST_NAT].serve("name", lambda connection: (connection.sendall(b"donor"), connection.close()))
    member = internet.members([FIRST_NAT])[0]
    with internet.hosts.on(SECOND_NAT, internet.links[SECOND_NAT].call, member, "name", 10).result() as connection:
        assert connection.recv(5) == b"donor"
    assert not internet.links[0]._relay._registered.keys() & {internet.links[number].id for number in numbers}
