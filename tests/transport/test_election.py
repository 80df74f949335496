from __future__ import annotations

import pytest

from isthmus.transport.elastic.election import leaders, link, weigh


def card(version=1, chain="a", outer_step=5, healed=False, **more):
    return {"version": version, "chain": chain, "outer_step": outer_step, "healed": healed, **more}


def test_the_largest_version_leads():
    assert leaders({"a": card(1), "b": card(3, "c"), "c": card(2)}) == ["b"]


def test_a_fresh_worker_never_leads_however_many_there_are():
    fresh = {f"new-{k}": card(0, "new", 0) for k in range(5)}
    assert leaders(fresh | {"old": card(57)}) == ["old"]


def test_of_two_histories_the_majority_leads_and_in_a_tie_the_first_name():
    cards = {"a": card(4, "x"), "b": card(4, "y"), "c": card(4, "y")}
    assert leaders(cards) == ["b", "c"]
    assert leaders({name: cards[name] for name in "ab"}) == ["a"]


def test_who_asks_for_an_earlier_sync_is_behind():
    assert leaders({"a": card(outer_step=6), "b": card(outer_step=7), "c": card(outer_step=7)}) == ["b", "c"]


def test_the_order_of_the_cards_does_not_matter():
    cards = {"b": card(4, "y"), "a": card(4, "x")}
    assert leaders(cards) == leaders(dict(reversed(cards.items()))) == ["a"]


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("uniform", [1 / 2, 1 / 2]), ("samples", [1 / 4, 3 / 4]), ("samples_per_step", [3 / 5, 2 / 5])],
)
def test_weights(weighting, expected):
    cards = {"a": card(samples=60, samples_per_step=12), "b": card(samples=180, samples_per_step=8)}
    assert weigh(cards, ["a", "b"], weighting) == pytest.approx(expected)


def test_who_has_just_caught_up_has_no_weight_unless_all_have():
    cards = {"a": card(), "b": card(healed=True)}
    assert weigh(cards, ["a", "b"], "uniform") == [1.0, 0.0]
    assert weigh({"a": card(healed=True)}, ["a"], "uniform") == [1.0]


def test_the_chain_tells_commits_apart():
    one = link("a", 3, "meeting-1", ["a", "b"])
    assert one == link("a", 3, "meeting-1", ["a", "b"])
    others = [link("b", 3, "meeting-1", ["a", "b"]), link("a", 4, "meeting-1", ["a", "b"])]
    others += [link("a", 3, "meeting-2", ["a", "b"]), link("a", 3, "meeting-1", ["a"])]
    assert len({one, *others}) == 5
