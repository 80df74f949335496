"""One worker's stream: order, positions, and what it is told about its progress when the ledger moves."""

import json
from itertools import islice

import numpy as np
import pytest

from isthmus.core import UserError
from isthmus.data import LeasedBatches, LeasesExhausted, Ledger
from isthmus.data.base import Batches, SampleOrder
from isthmus.data.leased_batches import Rebase
from isthmus.data.tokens import TokenDataSet
from tests.data.number_order import Numbers


def read(stream: LeasedBatches, num_batches: int) -> list[int]:
    """The positions of the next samples."""
    return [position for batch in islice(stream, num_batches) for position in batch["position"].tolist()]


class Run:
    """Workers in lockstep: whoever is named in a sync takes part, and sees the vote."""

    def __init__(self, lease_commits: int = 1, samples: SampleOrder = Numbers()) -> None:  # noqa: B008 (a frozen value)
        self.samples = samples
        self.ledger = Ledger(samples.fingerprint, shard_size=10, lease_commits=lease_commits)

    def stream(self, worker: str, batch_size: int = 3) -> LeasedBatches:
        stream = LeasedBatches(self.samples, worker, batch_size)
        stream.rebase(self.ledger)
        return stream

    def sync(self, *streams: LeasedBatches, batches_ahead: int = 4) -> None:
        proposals = {stream.worker: stream.propose(batches_ahead) for stream in streams}
        self.ledger = self.ledger.commit(proposals, list(proposals))
        for stream in streams:
            captured = stream.uncommitted
            assert stream.rebase(self.ledger) == Rebase(committed=captured)


def test_a_worker_alone_reads_the_line_in_order_whatever_its_batch_size():
    for batch_size in (1, 3, 7, 64):
        run = Run()
        stream: Batches = run.stream("a", batch_size)
        positions = []
        for _ in range(30):
            run.sync(stream, batches_ahead=2)
            positions += read(stream, 2)
        assert positions == list(range(60 * batch_size))


def test_what_was_read_after_the_capture_stays_uncommitted():
    """A sync that overlaps: the proposal is made at step 2, lands after step 4, and the next capture follows."""
    run = Run()
    a = run.stream("a")
    run.sync(a, batches_ahead=20)
    positions = read(a, 2)
    first = a.propose(20)
    positions += read(a, 1)
    second = a.propose(20)  # in flight together with the first
    positions += read(a, 1)
    for proposal, landed, committed in ((first, 6, 6), (second, 3, 9)):
        run.ledger = run.ledger.commit({"a": proposal}, ["a"])
        assert run.ledger.samples == committed
        assert a.rebase(run.ledger) == Rebase(committed=landed)
        assert a.uncommitted == 12 - committed
    assert positions + read(a, 3) == list(range(21))


def test_a_stream_that_has_read_all_its_leases_says_so_and_takes_nothing():
    run = Run()
    a, b = run.stream("a"), run.stream("b")
    with pytest.raises(LeasesExhausted, match="a has read all that is leased to it: sync before the next step"):
        next(a)
    run.sync(a, b, batches_ahead=1)
    assert a.batches_left == 3
    positions = read(a, 3)
    for _ in range(2):
        assert a.batches_left == 0
        with pytest.raises(LeasesExhausted):
            next(a)
        assert a.uncommitted == 9
    run.sync(a, b, batches_ahead=2)
    assert positions + read(a, 2) == [*range(10), *range(20, 25)]  # the one that was left over comes first


def test_a_dead_workers_uncommitted_samples_are_read_by_another():
    run = Run(lease_commits=1)
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    of_a, of_b = read(a, 2), read(b, 2)
    run.sync(a, b)
    read(b, 2)  # dies with these
    for _ in range(6):
        of_a += read(a, 4)
        run.sync(a)
    assert sorted(of_a + of_b) == list(range(len(of_a + of_b)))
    assert run.ledger.samples == len(of_a + of_b)


def test_a_worker_that_died_and_came_back_under_its_name_reads_again_what_died_with_it():
    run = Run(lease_commits=1)
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    read(b, 2)
    run.sync(a, b)
    died = read(b, 2)
    run.sync(a)
    assert died == [26, 27, 28, 29, 30, 31]
    assert read(run.stream("b"), 2) == died


def test_a_straggler_keeps_its_progress_while_its_leases_are_held_and_is_told_when_not():
    run = Run(lease_commits=1)
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    read(b, 2)
    run.sync(a)
    assert b.rebase(run.ledger) == Rebase()
    assert b.uncommitted == 6
    run.sync(a)
    assert b.rebase(run.ledger) == Rebase(void=6)  # void: its leases are given back
    assert (b.uncommitted, b.batches_left) == (0, 0)
    run.sync(a, b)
    assert run.ledger.samples == 0
    assert read(b, 1) == [20, 21, 22]


def test_a_straggler_whose_leases_came_back_to_it_has_lost_its_progress_all_the_same():
    """Somebody else may have read a part of them meanwhile."""
    run = Run(lease_commits=0)
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    read(b, 2)
    run.sync(a)
    other_life = run.stream("b")
    run.sync(a, other_life)
    assert run.ledger.workers["b"].leases[0][0] == 20
    assert b.rebase(run.ledger) == Rebase(void=6)
    assert read(b, 1) == [20, 21, 22]


def test_a_worker_that_missed_the_vote_keeps_what_it_read_after_the_capture():
    run = Run()
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    read(b, 2)
    captured = b.propose(4)
    after = read(b, 1)
    run.ledger = run.ledger.commit({"a": a.propose(4), "b": captured}, ["a", "b"])
    assert b.rebase(run.ledger) == Rebase(committed=6)
    assert (run.ledger.samples, b.uncommitted) == (6, len(after))


def test_a_worker_restored_from_before_its_last_commits_is_told_that_its_progress_is_in_already():
    run = Run()
    a = run.stream("a")
    run.sync(a)
    read(a, 3)
    saved = json.loads(json.dumps(a.state_dict()))
    for more in (0, 1):  # committed up to the very sample of the checkpoint, though never captured by it; then beyond
        read(a, more)
        run.sync(a)
        restored = run.stream("a")
        restored.load_state_dict(saved)
        assert restored.uncommitted == 9
        assert restored.rebase(run.ledger) == Rebase(void=9)
        assert restored.uncommitted == 0


def test_a_restored_worker_is_told_that_another_life_of_it_sent_what_it_holds():
    """Captured, but left out; saved; sent after that; restored. By name and number of commit it never sent it."""
    run = Run()
    a, b = run.stream("a"), run.stream("b")
    run.sync(a, b)
    read(a, 1)
    run.ledger = run.ledger.commit({"a": a.propose(4), "b": b.propose(4)}, ["b"])
    saved = a.state_dict()
    run.sync(a, b)
    restored = run.stream("a")
    restored.load_state_dict(saved)
    assert restored.rebase(run.ledger) == Rebase(committed=3)
    assert restored.uncommitted == 0


def test_a_ledger_on_another_line_of_history_voids_what_was_read():
    """The same commit number gave other samples: only the leases themselves tell."""
    here, there = Run(), Run()
    a = here.stream("a")
    here.sync(a)
    read(a, 2)
    there.sync(there.stream("0"), there.stream("a"))
    assert here.ledger.workers["a"].since == there.ledger.workers["a"].since
    assert a.rebase(there.ledger) == Rebase(void=6)


def test_rolling_back_reads_again_from_the_last_commit():
    run = Run()
    a = run.stream("a")
    run.sync(a)
    first = read(a, 2)
    a.roll_back()
    assert read(a, 2) == first


def test_a_sync_that_lands_after_its_pseudo_gradient_was_dropped_voids_what_was_read_again():
    run = Run()
    a = run.stream("a")
    run.sync(a)
    first = read(a, 2)
    proposal = a.propose(4)
    a.roll_back()
    assert read(a, 2) == first
    run.ledger = run.ledger.commit({"a": proposal}, ["a"])
    assert a.rebase(run.ledger) == Rebase(void=6)
    assert read(a, 1) == [6, 7, 8]


@pytest.mark.parametrize("in_flight", [False, True])
def test_identity_37_a_restored_position_goes_on_bitwise(in_flight):
    """At every batch of some rounds; also where a sync was in flight when it was saved, and landed since."""
    run = Run()
    a = run.stream("a", 4)
    run.sync(a)
    for _ in range(12):
        read(a, 1)
        proposal = a.propose(4)
        read(a, 1)
        restored = LeasedBatches(run.samples, "a", 4)
        restored.load_state_dict(json.loads(json.dumps(a.state_dict())))
        if in_flight:
            run.ledger = run.ledger.commit({"a": proposal}, ["a"])
        for stream in (a, restored):
            assert stream.rebase(run.ledger) == Rebase(committed=4 if in_flight else 0)
        assert restored.state_dict() == a.state_dict()
        assert restored.uncommitted == (4 if in_flight else 8)
        expected = read(restored, 1)
        assert read(a, 1) == expected
        run.sync(a)
        assert a.state_dict()["captured"] == []  # only what may still be committed is kept


def data_set_of(num_tokens: int, sequence_length: int = 4) -> TokenDataSet:
    """Token i is the number i, so a window says where it comes from."""
    return TokenDataSet(np.arange(num_tokens), np.arange(num_tokens), sequence_length, num_tokens)


def test_every_window_comes_once_an_epoch_whoever_reads():
    """The number of workers goes 2 -> 4 -> 1 -> 3, each time from the saved ledger."""
    samples = data_set_of(603).sample_order(seed=3)
    run = Run(samples=samples)
    starts: list[int] = []
    for num_workers in (2, 4, 1, 3):
        run.ledger = Ledger.from_state_dict(json.loads(json.dumps(run.ledger.state_dict())))
        streams = [run.stream(str(worker)) for worker in range(num_workers)]
        run.sync(*streams)
        for _ in range(12):
            starts += [start for s in streams for b in islice(s, 4) for start in b["tokens"][:, 0].tolist()]
            run.sync(*streams)
            assert run.ledger.samples == len(starts)
    held = [lease for holding in run.ledger.workers.values() for lease in holding.leases]
    uncommitted = {position for lease in [*held, *run.ledger.returned] for position in range(*lease)}
    committed = np.array([position for position in range(run.ledger.frontier) if position not in uncommitted])
    assert min(uncommitted) > 2 * samples.num_samples  # two epochs are finished
    assert sorted(starts) == sorted(samples.read(committed)["tokens"][:, 0].tolist())


def test_other_data_is_refused():
    stream = LeasedBatches(data_set_of(403).sample_order(), "a", 3)
    with pytest.raises(UserError, match="give all workers the same data, sequence_length and seed"):
        stream.rebase(Ledger(data_set_of(404).sample_order().fingerprint))
    with pytest.raises(UserError, match="the saved position is one in data .*: restore the data"):
        stream.load_state_dict(LeasedBatches(data_set_of(404).sample_order(), "a", 3).state_dict())
    with pytest.raises(UserError, match="batch_size is 1000, and the data set has 99 training samples"):
        LeasedBatches(data_set_of(403).sample_order(), "a", 1000)
    with pytest.raises(UserError, match="batch_size is 0"):
        LeasedBatches(Numbers(), "a", 0)


def test_tokens_are_counted():
    assert LeasedBatches(data_set_of(403).sample_order(), "a", 3).tokens_per_batch == 12
