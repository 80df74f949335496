from __future__ import annotations

import pytest

from isthmus.transport.elastic.election import leaders, weigh, what_lacks


def info(version=1, chain="a", outer_step=5, healed=False, **more):
    return {"version": version, "chain": chain, "outer_step": outer_step, "healed": healed, **more}


def test_the_largest_version_leads():
    assert leaders({"a": info(1), "b": info(3, "c"), "c": info(2)}) == ["b"]


def test_a_fresh_worker_never_leads_however_many_there_are():
    fresh = {f"new-{k}": info(0, "new", 0) for k in range(5)}
    assert leaders(fresh | {"old": info(57)}) == ["old"]


def test_of_two_histories_the_majority_leads_and_in_a_tie_the_first_name():
    members = {"a": info(4, "x"), "b": info(4, "y"), "c": info(4, "y")}
    assert leaders(members) == ["b", "c"]
    assert leaders({name: members[name] for name in "ab"}) == ["a"]


def test_who_asks_for_an_earlier_sync_is_behind():
    assert leaders({"a": info(outer_step=6), "b": info(outer_step=7), "c": info(outer_step=7)}) == ["b", "c"]


def test_the_order_of_the_infos_does_not_matter():
    members = {"b": info(4, "y"), "a": info(4, "x")}
    assert leaders(members) == leaders(dict(reversed(members.items()))) == ["a"]


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("uniform", [1 / 2, 1 / 2]), ("samples", [1 / 4, 3 / 4]), ("samples_per_step", [3 / 5, 2 / 5])],
)
def test_weights(weighting, expected):
    members = {"a": info(samples=60, samples_per_step=12), "b": info(samples=180, samples_per_step=8)}
    assert weigh(members, ["a", "b"], weighting) == pytest.approx(expected)


def test_who_has_just_caught_up_has_no_weight_unless_all_have():
    members = {"a": info(), "b": info(healed=True)}
    assert weigh(members, ["a", "b"], "uniform") == [1.0, 0.0]
    assert weigh({"a": info(healed=True)}, ["a"], "uniform") == [1.0]


def voters(*names, needed=1, last=()):
    return {name: {"needed_workers": needed, "last_members": list(last)} for name in names}


def test_half_of_those_who_made_the_last_commit_are_too_few_and_newcomers_do_not_count():
    last = ("a", "b", "c", "d", "e", "f")
    assert what_lacks(voters(*"abcd", needed=3, last=last), [*"abcd"]) == ""
    for half in ("abc", "def", "abcxyz"):
        assert "of the 6 workers that made the last commit 3 are here" in what_lacks(voters(*half, last=last), [*half])


def test_survivors_of_one_death_after_the_other_are_enough():
    members = "abcdef"
    while len(members) > 3:
        last, members = members, members[1:]
        assert what_lacks(voters(*members, needed=3, last=last), [*members]) == ""
    assert "2 of at least 3 workers are here (e, f)" in what_lacks(voters("e", "f", needed=3, last="def"), ["e", "f"])


def test_whoever_says_that_more_are_needed_is_heard_and_whoever_says_less_is_not():
    members = voters("a", "b", needed=2, last="ab") | voters("c", needed=1, last="c")
    assert what_lacks(members, ["a", "b", "c"]) == ""
    assert what_lacks(members | voters("c", needed=4), ["a", "b", "c"])
    assert what_lacks(members | voters("c", last="xyz"), ["a", "b", "c"])
    assert what_lacks(voters("a", "b", "c"), ["a", "b", "c"]) == ""  # a number of workers was set, or a new run
    assert what_lacks(voters("a", needed=1, last="ab") | voters("c", last="c"), ["a", "c"])
