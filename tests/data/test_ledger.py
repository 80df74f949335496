"""The ledger: what a commit does, what is refused, and that its state stays small."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data.ledger import MAX_DEMAND, Ledger, cut, join, length


def proposal(since: int = -1, samples: int = 0, demand: int = 0) -> dict[str, int]:
    return {"since": since, "samples": samples, "demand": demand}


def opened(*workers: str, demand: int = 20, lease_commits: int = 3) -> Ledger:
    """A run of which nobody has read anything yet: shards of ten, the workers have two each."""
    ledger = Ledger("numbers", shard_size=10, lease_commits=lease_commits)
    return ledger.commit({worker: proposal(demand=demand) for worker in workers}, ())


def leases(ledger: Ledger) -> dict[str, tuple[tuple[int, int], ...]]:
    return {worker: holding.leases for worker, holding in ledger.workers.items()}


def test_the_first_commit_leases_whole_shards_by_name():
    ledger = opened("b", "a", demand=15)
    assert leases(ledger) == {"a": ((0, 20),), "b": ((20, 40),)}
    assert (ledger.commits, ledger.samples, ledger.frontier) == (1, 0, 40)


def test_a_commit_advances_contributors_and_fills_up_what_they_ask_for():
    ledger = opened("a", "b")
    proposals = {"a": proposal(1, 13, demand=20), "b": proposal(1, 7, demand=20)}
    after = ledger.commit(proposals, ["a"])
    assert leases(after) == {"a": ((13, 20), (40, 60)), "b": ((20, 40), (60, 70))}
    assert after.samples == 13
    assert after.workers["a"].samples == 13
    assert after.workers["b"].samples == 0  # it was there, but its pseudo-gradient is not in the mean
    assert (ledger.commits, ledger.samples) == (1, 0)  # a value: the old one is as it was
    assert after.gain("a", proposal(1, 15)) == 2


def test_the_same_proposal_again_adds_nothing():
    """Fragments that are captured at one step come with one proposal."""
    ledger = opened("a")
    once = ledger.commit({"a": proposal(1, 13, 5)}, ["a"])
    twice = once.commit({"a": proposal(1, 13, 5)}, ["a"])
    assert (twice.samples, leases(twice), twice.commits) == (13, leases(once), 3)


def test_an_absent_worker_keeps_its_leases_for_a_few_commits_then_returns_them_where_they_are_committed():
    ledger = opened("a", "b", lease_commits=2)
    ledger = ledger.commit({"a": proposal(1, 3, 20), "b": proposal(1, 5, 0)}, ["a", "b"])
    for _ in range(2):
        ledger = ledger.commit({"a": proposal(1, 3, 20)}, ())
        assert leases(ledger)["b"] == ((25, 40),)
    ledger = ledger.commit({"a": proposal(1, 3, 20)}, ())
    assert leases(ledger) == {"a": ((3, 20), (40, 50))}
    assert ledger.returned == ((25, 40),)
    ledger = ledger.commit({"a": proposal(1, 3, 30), "c": proposal(demand=20)}, ())
    assert leases(ledger) == {"a": ((3, 20), (40, 50), (25, 30)), "c": ((30, 40), (50, 60))}  # returned ones first
    assert ledger.samples == 8


def test_what_was_given_back_is_leased_from_left_to_right_whatever_the_order_of_the_table():
    ledger = opened("a", "b", "c", lease_commits=0)
    backwards = Ledger.from_state_dict(
        ledger.state_dict() | {"holdings": dict(reversed(ledger.state_dict()["holdings"].items()))}
    )
    for same in (ledger, backwards):
        same = same.commit({"a": proposal(1, 7, 0), "c": proposal(1, 5, 0)}, ["a", "c"])
        same = same.commit({"d": proposal(demand=1)}, ())  # all others are gone
        assert leases(same) == {"d": ((7, 10),)}
        assert same.returned == ((10, 40), (45, 60))
        same = same.commit({"d": proposal(2 + 1, 0, 36)}, ())
        assert leases(same) == {"d": ((7, 40), (45, 50))}
        assert same.returned == ((50, 60),)


def test_a_worker_that_comes_back_in_time_keeps_its_leases():
    ledger = opened("a", "b", lease_commits=2)
    for _ in range(2):
        ledger = ledger.commit({"a": proposal(1, 0, 20)}, ())
    ledger = ledger.commit({"a": proposal(1, 0, 20), "b": proposal(1, 11, 20)}, ["b"])
    assert leases(ledger) == {"a": ((0, 20),), "b": ((31, 60),)}  # neighbours are one lease
    assert ledger.samples == 11


def test_new_leases_do_not_take_the_proposals_of_old_ones():
    ledger = opened("a", "b", lease_commits=0).commit({"a": proposal(1, 0, 20)}, ())
    ledger = ledger.commit({"a": proposal(1, 0, 20), "b": proposal(demand=20)}, ())
    assert leases(ledger)["b"] == ((20, 40),)  # the very samples that it had
    assert "leased at commit 1, but holds those of 3" in ledger.check("b", proposal(1, 5))
    assert ledger.check("b", proposal(3, 5)) == ""


REFUSED = {
    "none": None,
    "text": "all of it",
    "list": [1, 0, 0],
    "missing": {"since": 1, "samples": 0},
    "more": proposal(1) | {"shard": 3},
    "fraction": proposal(1) | {"samples": 3.0},
    "bool": proposal(1) | {"samples": True},
    "no number": proposal(1) | {"samples": None},
    "negative": proposal(1, -1),
    "negative demand": proposal(1, 0, -1),
    "greedy": proposal(1, 0, MAX_DEMAND + 1),
    "another's": proposal(2, 0),
    "no holding, but samples": proposal(-1, 5),
    "before all": proposal(-2),
    "beyond": proposal(1, 31),
    "backwards": proposal(1, 2),
}


@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_proposal_is_refused_with_a_reason_and_changes_nothing(bad):
    ledger = opened("a", "b").commit({"a": proposal(1, 3, 20)}, ["a"])
    assert leases(ledger)["a"] == ((3, 20), (40, 50))
    assert ledger.check("a", proposal(1, 30, MAX_DEMAND)) == ""
    reason = ledger.check("a", bad)
    assert reason.startswith("a: ")
    assert "\n" not in reason
    with pytest.raises(ValueError, match="ledger: a: "):
        ledger.commit({"a": bad}, ["a"])


def test_a_contributor_must_be_present_and_a_stranger_has_read_nothing():
    ledger = opened("a")
    with pytest.raises(ValueError, match="its proposal is missing"):
        ledger.commit({}, ["a"])
    assert ledger.check("c", proposal(samples=5))
    assert ledger.check("c", proposal()) == ""
    assert ledger.commit({"c": proposal(demand=5)}, ["c"]).samples == 0


@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
def test_who_sends_nonsense_but_does_not_contribute_is_only_there(bad):
    """It keeps its leases, and gets at most what it may ask for."""
    ledger = opened("a", "b")
    after = ledger.commit({"a": bad, "b": proposal(1, 5, 20)}, ["b"])
    assert leases(after)["a"] == ((0, 20),)
    assert after.workers["a"].seen == 2


def test_a_state_goes_through_json():
    ledger = opened("a", "b", "ü", lease_commits=0).commit({"a": proposal(1, 13, 25)}, ["a"])
    again = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again == ledger
    assert again.digest() == ledger.digest()
    assert again.state_dict() == ledger.state_dict()
    assert ledger.returned


def paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Of all leaves."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in paths(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, inner in enumerate(value) for leaf in paths(inner, (*path, key))]
    return [path]


STATE = opened("a", "b", lease_commits=0).commit({"a": proposal(1, 13, 25)}, ["a"]).state_dict()


@pytest.mark.parametrize("path", paths(STATE), ids=str)
@pytest.mark.parametrize("value", [-1, None, True, 1.5, "7", 10**6, []], ids=str)
def test_a_state_that_does_not_add_up_is_refused(path, value):
    state = json.loads(json.dumps(STATE))
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    harmless = {("lease_commits",): 10**6, ("commits",): 10**6, ("corpus",): "7"}
    if path in harmless and value == harmless[path]:
        assert Ledger.from_state_dict(state).digest() != Ledger.from_state_dict(STATE).digest()
        return
    with pytest.raises(ValueError, match="not the state of a data ledger") as error:
        Ledger.from_state_dict(state)
    assert "\n" not in str(error.value)
    assert "()" not in str(error.value)


@pytest.mark.parametrize("state", [{}, [], None, STATE | {"holdings": []}, STATE | {"more": 1}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="not the state of a data ledger"):
        Ledger.from_state_dict(state)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_lists_of_numbers_written_shortly(pairs, first, last):
    intervals = [(start, start + size) for start, size in pairs]
    numbers = [number for start, end in intervals for number in range(start, end)]
    expand = lambda parts: [number for start, end in parts for number in range(start, end)]  # noqa: E731
    assert expand(join(intervals)) == numbers
    assert length(intervals) == len(numbers)
    assert expand(cut(intervals, first)) == numbers[first:]
    assert expand(cut(intervals, first, last)) == numbers[first:last]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_same_commits_make_the_same_ledger_whatever_the_order_of_the_cards(data):
    names = ["a", "b", "c", "d"]
    ledgers = [Ledger("numbers", 10, 1)] * 2
    for _ in range(data.draw(st.integers(1, 8))):
        here = data.draw(st.permutations(names))[: data.draw(st.integers(1, 4))]
        proposals = {}
        for name in here:
            held = ledgers[0].workers.get(name)
            most = length(held.leases) if held else 0
            samples = (held.samples if held else 0) + data.draw(st.integers(0, most))
            proposals[name] = proposal(held.since if held else -1, samples, data.draw(st.integers(0, 40)))
        contributors = [name for name in here if data.draw(st.booleans())]
        expected = ledgers[0].samples + sum(ledgers[0].gain(name, proposals[name]) for name in contributors)
        other_order = {name: proposals[name] for name in reversed(list(proposals))}
        ledgers = [ledgers[0].commit(proposals, contributors), ledgers[1].commit(other_order, contributors[::-1])]
        assert ledgers[0].digest() == ledgers[1].digest()
        assert ledgers[0].samples == expected
        for name, asked in proposals.items():
            held = ledgers[0].workers[name]
            assert held.samples + length(held.leases) >= asked["samples"] + asked["demand"]


def test_ten_thousand_commits_of_eight_workers_leave_a_small_state():
    """Workers of eight speeds; one dies in every fifth round, half of these never come back under their names."""
    chance = random.Random(0)
    names, ledger, largest = [f"worker-{i}" for i in range(8)], Ledger("numbers"), 0
    away: dict[str, int] = {}
    for commit in range(10_000):
        proposals = {}
        for speed, name in enumerate(names, start=1):
            held = ledger.workers.get(name)
            took = 100 * speed + chance.randrange(50)
            samples = held.samples + min(took, length(held.leases)) if held else 0
            if away.get(name, 0) <= commit:
                proposals[name] = proposal(held.since if held else -1, samples, 3 * took)
        contributors = [name for name in proposals if chance.random() < 0.9]
        ledger = ledger.commit(proposals, contributors)
        if chance.random() < 0.2:
            slot = chance.randrange(8)
            if chance.random() < 0.5:
                names[slot] = f"worker-{commit}"
            away[names[slot]] = commit + chance.randrange(10)
        if commit % 16 == 0:
            largest = max(largest, len(json.dumps(ledger.state_dict())))
    assert ledger.samples > 10_000_000
    assert largest < 4_000  # bytes of JSON; 1,689 when this was written
