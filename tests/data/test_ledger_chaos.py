"""Joins, deaths, refused syncs, missed votes, heals and restores at random; a model remembers every sample."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.data import LeasedBatches, Ledger
from isthmus.data.leased_batches import Rebase
from tests.data.number_order import Numbers

NAMES = ["a", "b", "c", "d", "e"]
BATCH_SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 7}


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state, sort_keys=True))


@dataclass
class Worker:
    """A worker, and what its pseudo-gradient would hold if it were captured now."""

    stream: LeasedBatches
    ledger: Ledger
    gradient: list[int] = field(default_factory=list)
    captures: set[int] = field(default_factory=set)  # lengths at which it was captured: it can be parted only there

    def capture(self, batches_ahead: int) -> dict[str, int]:
        self.captures.add(len(self.gradient))
        return through_json(self.stream.propose(batches_ahead))

    def adopt(self, ledger: Ledger) -> Rebase:
        """What the house does after a commit and after a heal."""
        self.ledger = ledger
        moved = self.stream.rebase(ledger)
        assert moved.void in (0, len(self.gradient))
        assert moved.committed in {0, *self.captures}
        done = moved.void or moved.committed
        self.gradient = self.gradient[done:]
        self.captures = {length - done for length in self.captures if length > done and not moved.void}
        return moved

    def drop(self) -> None:
        self.stream.roll_back()
        self.gradient, self.captures = [], set()

    def read(self, num_batches: int) -> None:
        for _ in range(min(num_batches, self.stream.batches_left)):
            self.gradient += next(self.stream)["position"].tolist()


class Chaos(RuleBasedStateMachine):
    """The house's rules in miniature; `entered` is the model: every sample that a committed mean held."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("numbers", shard_size=4, lease_commits=1)  # of those who are not behind
        self.entered: Counter[int] = Counter()
        self.workers: dict[str, Worker] = {}
        self.disk: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], set[int]]] = {}

    def alive(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.workers)))

    @initialize(batches_ahead=st.integers(1, 8))
    def begin(self, batches_ahead: int) -> None:
        """Three workers, to whom the first commit gives leases."""
        for name in NAMES[:3]:
            self.join(name)
        proposals = {name: worker.stream.propose(batches_ahead) for name, worker in self.workers.items()}
        self.ledger = self.ledger.commit(proposals, ())
        for name in self.workers:
            self.heal(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """A new worker, or one that died (or dies now) and begins again under its name."""
        self.workers[name] = Worker(LeasedBatches(Numbers(), name, BATCH_SIZES[name]), Ledger("numbers", 4, 1))
        self.heal(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        del self.workers[self.alive(data)]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), num_batches=st.integers(1, 6))
    def train_one(self, data: st.DataObject, num_batches: int) -> None:
        self.workers[self.alive(data)].read(num_batches)

    @rule(num_batches=st.integers(1, 3))
    def train_all(self, num_batches: int) -> None:
        for worker in self.workers.values():
            worker.read(num_batches)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        name = self.alive(data)
        worker = self.workers[name]
        states = through_json(worker.stream.state_dict()), through_json(worker.ledger.state_dict())
        self.disk[name] = (*states, list(worker.gradient), set(worker.captures))

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """However old the checkpoint; where its ledger is the newest, it goes on at once, else it heals."""
        name = data.draw(st.sampled_from(sorted(self.disk)))
        position, ledger, gradient, captures = self.disk[name]
        worker = Worker(LeasedBatches(Numbers(), name, BATCH_SIZES[name]), Ledger.from_state_dict(ledger))
        worker.stream.load_state_dict(position)
        worker.gradient, worker.captures = list(gradient), set(captures)
        self.workers[name] = worker
        if worker.ledger != self.ledger:
            self.heal(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def heal_one(self, data: st.DataObject) -> None:
        self.heal(self.alive(data))

    def heal(self, name: str) -> None:
        self.workers[name].adopt(Ledger.from_state_dict(through_json(self.ledger.state_dict())))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A worker's gradient is not finite: it begins this round again, from a leader's state."""
        name = self.alive(data)
        self.workers[name].drop()
        self.heal(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), batches_ahead=st.integers(0, 8), overlap=st.integers(0, 2))
    def sync(self, data: st.DataObject, batches_ahead: int, overlap: int) -> None:
        """All who come meet, and contribute unless left out or behind; then the vote is lost, or not seen by some."""
        some = st.sets(st.sampled_from(NAMES), max_size=2)
        met = self.workers.keys() - data.draw(some, label="absent")
        able = sorted(name for name in met if self.workers[name].ledger == self.ledger)
        contributors = set(able) - data.draw(some, label="left out")
        saw = set(able) - data.draw(some, label="did not see the vote")
        proposals = {name: self.workers[name].capture(batches_ahead) for name in sorted(met)}
        assert {name: self.ledger.check(name, proposals[name]) for name in able} == dict.fromkeys(able, "")
        captured = {name: list(self.workers[name].gradient) for name in contributors}
        for name in sorted(met):
            self.workers[name].read(overlap)
        if not saw:  # nobody committed, so it is as if the vote had been no
            return
        after = {name: self.workers[name].ledger.commit(proposals, contributors) for name in saw}
        assert len({ledger.digest() for ledger in after.values()}) == 1
        self.ledger = after[min(saw)]
        for gradient in captured.values():
            self.entered.update(gradient)
        for name in saw:
            assert self.workers[name].adopt(after[name]) == Rebase(committed=len(captured.get(name, [])))
        for name in met - set(able):
            self.heal(name)

    @rule(batches_ahead=st.integers(0, 8))
    def refuse(self, batches_ahead: int) -> None:
        """A sync that is refused: all who are not behind have captured, and nothing is changed."""
        for worker in self.workers.values():
            if worker.ledger == self.ledger:
                worker.capture(batches_ahead)

    @invariant()
    def the_ledger_says_what_entered(self) -> None:
        """Nothing twice, and the sums are equal, at every commit; what entered is all that is below the frontier."""
        assert self.entered.total() == self.ledger.samples == len(self.entered)
        held = [lease for holding in self.ledger.workers.values() for lease in holding.leases]
        open_positions = {position for lease in [*held, *self.ledger.returned] for position in range(*lease)}
        assert set(self.entered) == set(range(self.ledger.frontier)) - open_positions

    @invariant()
    def a_stream_knows_what_its_gradient_holds(self) -> None:
        """But for a worker that has not seen a vote yet, nothing in a gradient is in the model or in another's."""
        for worker in self.workers.values():
            assert worker.stream.uncommitted == len(worker.gradient)
        current = [worker.gradient for worker in self.workers.values() if worker.ledger == self.ledger]
        together = Counter(position for gradient in current for position in gradient)
        assert together.total() == len(together)
        assert not together.keys() & self.entered.keys()

    def teardown(self) -> None:
        """All die; whoever comes then finds every sample that was ever leased and did not enter."""
        frontier = self.ledger.frontier
        self.workers.clear()
        self.join("a")
        for _ in range(2 * frontier):
            worker, before = self.workers["a"], self.ledger.samples
            worker.read(64)
            proposals = {"a": worker.capture(64)}
            self.entered.update(worker.gradient)
            self.ledger = self.ledger.commit(proposals, ["a"])
            assert worker.adopt(self.ledger) == Rebase(committed=worker.ledger.samples - before)
            if all(position in self.entered for position in range(frontier)):
                break
        assert set(range(frontier)) <= self.entered.keys()
        self.the_ledger_says_what_entered()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
