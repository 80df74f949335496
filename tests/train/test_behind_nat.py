"""Workers that nobody outside can reach train, catch up and donate: real processes, real firewalls and NATs."""

from contextlib import contextmanager

import pytest
from elastic_world import HOSTS_SECRET, World
from tests.hosts import Hosts, skip_where_there_are_none

from isthmus.transport.relay_server import relay
from isthmus.transport.torchft.lighthouse import lighthouse
from isthmus.transport.trust import SECRET

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def hosts_are_possible():
    skip_where_there_are_none()


@contextmanager
def on(hosts, number, context):
    """A context that is entered and left on a host."""
    try:
        yield hosts.on(number, context.__enter__).result()
    finally:
        hosts.on(number, context.__exit__, None, None, None).result()


@contextmanager
def world(folder, kinds, num_workers, **options):
    """A run on hosts of these kinds; the last one is open, and has the lighthouse."""
    hosts, last = Hosts(kinds), len(kinds) - 1
    try:
        with on(hosts, last, lighthouse("0.0.0.0:29510", grace_seconds=2, dead_seconds=3)):
            run = World(folder, f"{hosts.addresses[last]}:29510", "diloco", hosts, num_workers, **options)
            try:
                yield run
            finally:
                run.end()
    finally:
        hosts.close()


def strike(run, victim, others):
    """Let all sync, kill one in the middle of a sync, start it again, and let them come to the end."""
    num_workers = len(others) + 1
    for rank in [victim, *others]:
        run.start(rank, deaths=[("mid-mean", 4)] if rank == victim else [])
    run.wait_for(lambda: run.died(victim) == 1 and run.exit_code(victim) is not None)
    run.start(victim, resume=True)
    run.wait_for(lambda: run.syncs(victim, peers=num_workers) > 1)
    run.wait_for_end()
    run.check([victim, *others])


def test_two_that_drop_what_comes_from_outside_and_a_third_that_can_be_reached(tmp_path):
    with world(tmp_path, ["filtered", "filtered", "open"], 3) as run:
        strike(run, 1, [0, 2])


def test_two_behind_nats_with_the_same_address_and_a_relay(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, HOSTS_SECRET)
    behind_nats = world(tmp_path, ["nat", "nat", "open"], 2, via="10.99.0.12:29530", port=4000)
    with behind_nats as run, on(run.hosts, 2, relay("0.0.0.0:29530")):
        strike(run, 1, [0])
