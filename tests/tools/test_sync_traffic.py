"""What crosses in a sync, and from which schedule on that hides."""

import pytest
from tests.launched import ROOT

from isthmus.recipes import load_config
from isthmus.tools.sync_traffic import Hiding, SyncTraffic, Uplink, readable_seconds, sync_traffic
from isthmus.transport.link_model import LinkModel

TINY = ROOT / "examples/tiny.yaml"
TRIPS = {  # of four workers: a report, one or two shots, a vote; what torch's ring takes
    "diloco": 4,
    "opendiloco": 4,
    "streaming": 4,
    "sparseloco": 3,
    "ddp": 6,
}


@pytest.mark.parametrize(("recipe", "num_trips"), TRIPS.items())
def test_trips_of_a_sync(recipe, num_trips):
    traffic = sync_traffic(load_config(TINY, [f"outer.recipe={recipe}"], 4))
    assert {each.num_trips for each in traffic.values()} == {num_trips}
    kinds = {tuple(collective.kind for collective in each.collectives) for each in traffic.values()}
    shots: dict[str, tuple[str, ...]] = {
        "diloco": ("all_reduce",),
        "opendiloco": ("all_to_all", "all_gather"),
        "streaming": ("all_to_all", "all_gather"),
        "sparseloco": ("all_gather",),
    }
    assert kinds == ({("all_gather", *shots[recipe], "all_gather")} if recipe in shots else {("all_reduce",)})


def test_an_elastic_world_meets_first():
    static, elastic = (
        sync_traffic(load_config(TINY, [f"outer.transport={{type: {engine}}}"], 2))["all"]
        for engine in ("torch_dist", "torchft")
    )
    assert elastic.num_trips == static.num_trips + 2
    assert elastic.sent_bytes == static.sent_bytes
    assert elastic.collectives[0].kind == "rendezvous"


def test_a_worker_alone_sends_nothing():
    for engine in ("torch_dist", "torchft"):
        traffic = sync_traffic(load_config(TINY, [f"outer.transport={{type: {engine}}}"], 1))
        assert traffic == {"all": SyncTraffic(0, 0, [])}


@pytest.mark.parametrize("recipe", ["diloco", "opendiloco", "sparseloco"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_identity_an_uplink_takes_as_long_as_the_collectives_on_even_links(recipe, num_workers):
    """Bytes over rate, and trips, are what the model of all links says, but for parts that are not of equal size."""
    (traffic,) = sync_traffic(load_config(TINY, [f"outer.recipe={recipe}"], num_workers)).values()
    links = LinkModel.even(num_workers, 1, 30)
    seconds = sum(map(links.seconds, traffic.collectives))
    hidden = 0.015 * (recipe == "diloco")  # the first bytes of the second shot cross while the last of the first do
    assert seconds == pytest.approx(Uplink(1, 30).seconds(traffic) - hidden, rel=1e-3)


def test_which_schedule_hides():
    assert Hiding.of([0.95], 0.1) == Hiding(10, 10)
    assert Hiding.of([0.2, 0.31, 0.1], 0.1) == Hiding(12, 4)
    assert Hiding.of([0.0], 0.1) == Hiding(1, 1)


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "12.3 ms"), (0.9, "900 ms"), (61.0, "61 s")])
def test_durations_are_readable(seconds, text):
    assert readable_seconds(seconds) == text
