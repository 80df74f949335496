"""The ledger of who reads which samples: a table that moves only with a commit, so that each enters the model once.

All workers share one endless order of the samples, epoch after epoch (`base.SampleOrder`). It is cut into shards of a
fixed number of samples. A lease is a run of shards that one worker reads, in order; its start moves on as what was read
is committed. Only the open parts of the order need to be written down: everything below the frontier is committed, but
for the leases and for what dead workers gave back. So the table stays small however long the run, and the order does
not depend on how many workers there are or were.

A `Ledger` is a value: `commit` makes the next one and leaves this one as it is. A refused sync has nothing to undo, a
heal replaces one value by another, and the training thread may read it while the communication thread makes the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

Interval = tuple[int, int]  # [start, end) in the order of the samples
Intervals = tuple[Interval, ...]

MAX_DEMAND = 2**24  # samples a worker may ask for beyond those it has read


@dataclass(frozen=True)
class Proposal:
    """A worker's proposal for the commit of a sync. Samples are counted from the beginning of its first lease."""

    since: int = -1  # the commit that gave it its first lease; -1: it has none
    samples: int = 0  # read when its pseudo-gradient was captured, committed ones included
    demand: int = 0  # samples that it wants to have leased beyond these

    @classmethod
    def read(cls, value: object) -> Proposal | None:
        """Return the proposal that another worker sent; None where it is none."""
        if not isinstance(value, dict) or value.keys() != {"since", "samples", "demand"}:
            return None
        read = cls(**value)
        fits = _is_count(read.samples) and _is_count(read.demand) and read.demand <= MAX_DEMAND
        return read if fits and (_is_count(read.since) or read == replace(read, since=-1)) else None


@dataclass(frozen=True)
class WorkerLeases:
    """The leases of one worker, from the commit that first gave it some until it has been away for too long."""

    since: int = -1  # the commit that gave it the first lease
    seen: int = -1  # the last commit at which it was there
    samples: int = 0  # committed since then
    leases: Intervals = ()  # not committed yet, in the order in which they are read

    def advance(self, samples: int) -> WorkerLeases:
        """Return the leases with everything committed up to the `samples`-th."""
        return replace(self, samples=samples, leases=cut(self.leases, samples - self.samples))


@dataclass(frozen=True)
class Ledger:
    """The replicated table: equal on all workers, bit for bit, after the same commits.

    Attributes:
        data_fingerprint: `SampleOrder.fingerprint` of the order that positions are positions in.
        shard_size: samples of a shard; leases end where a shard ends.
        lease_commits: commits that a worker may miss and keep its leases. A straggler's pseudo-gradient rides in its
            next sync, and counts only while nobody else was given its samples; a dead worker's samples merely
            come that many commits later. So a few are better than none, and many would let old samples lie.
        commits: so far, the one that gave the first leases included.
        samples: committed in total; those that are in the anchors.
        frontier: the first position that was never leased.
        returned: open parts that no worker holds, from left to right.
        workers: the leases of every worker, by its name.

    Raises:
        ValueError: the parts do not add up, so this is the state of no ledger.
    """

    data_fingerprint: str
    shard_size: int = 256
    lease_commits: int = 3
    commits: int = 0
    samples: int = 0
    frontier: int = 0
    returned: Intervals = ()
    workers: Mapping[str, WorkerLeases] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = [lease for own in self.workers.values() for lease in own.leases]
        before, num_open = 0, 0
        for start, end in sorted([*self.returned, *held]):
            if not before <= start < end <= self.frontier or end % self.shard_size:
                raise ValueError(f"ledger: samples {start} to {end} are leased twice, or not a part of a shard")
            before, num_open = end, num_open + end - start
        if self.samples != self.frontier - num_open:
            raise ValueError(f"ledger: {self.samples} samples committed, but {self.frontier - num_open} by its table")

    def check(self, worker: str, proposal: object) -> str:
        """Say why a worker's proposal cannot be committed; an empty string where it can.

        All workers check all proposals before they average: one that is refused takes no part in the mean.
        """
        read = Proposal.read(proposal)
        if read is None:
            return f"{worker}: its proposal is missing or cannot be read"
        own = self.workers.get(worker, WorkerLeases())
        if read.since != own.since:
            return f"{worker}: proposes samples leased at commit {read.since}, but holds those of {own.since}"
        if not 0 <= read.samples - own.samples <= length(own.leases):
            most = own.samples + length(own.leases)
            return f"{worker}: says that it has read {read.samples} samples; {own.samples} to {most} are possible"
        return ""

    def gain(self, worker: str, proposal: object) -> int:
        """Return how many samples a commit of a proposal adds; raise ValueError where `check` has a reason not to."""
        reason, read = self.check(worker, proposal), Proposal.read(proposal)
        if reason or read is None:
            raise ValueError(f"ledger: {reason}")
        return read.samples - self.workers.get(worker, WorkerLeases()).samples

    def commit(self, proposals: Mapping[str, object], contributors: Collection[str]) -> Ledger:
        """Return the ledger after one more commit.

        Contributors' leases advance to their proposals; workers long absent give theirs back; then all present ones
        get what they ask for: first what was given back, then fresh shards.

        Args:
            proposals: of all workers present, those without a weight included, by name.
            contributors: the workers whose pseudo-gradients are in the mean.

        Raises:
            ValueError: a contributor's proposal is not what `check` accepts.
        """
        number, workers = self.commits + 1, dict(self.workers)
        gains = {worker: self.gain(worker, proposals.get(worker)) for worker in sorted(contributors)}
        for worker, gain in gains.items():
            if gain:
                workers[worker] = workers[worker].advance(workers[worker].samples + gain)
        gone = [w for w, held in workers.items() if w not in proposals and number - held.seen > self.lease_commits]
        free = _Free(
            self.shard_size, [*self.returned, *(x for w in gone for x in workers.pop(w).leases)], self.frontier
        )
        for worker, proposal in sorted(proposals.items()):
            own = replace(workers.get(worker, WorkerLeases(since=number)), seen=number)
            missing = self._wanted(worker, proposal, own) - length(own.leases)
            workers[worker] = replace(own, leases=join([*own.leases, *free.take(missing)]))
        return replace(
            self,
            commits=number,
            samples=self.samples + sum(gains.values()),
            frontier=free.frontier,
            returned=join(free.returned),
            workers=workers,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: as large as the leases that are open, not as the data or the run."""
        state: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {_SAVED_AS.get(name, name): value for name, value in state.items()}

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Ledger:
        """Return the ledger that `state_dict` describes; raises ValueError for what is not a ledger's state."""
        try:
            state = {name: state_dict[_SAVED_AS.get(name, name)] for name in _FIELDS}
            workers = {worker: WorkerLeases(**held) for worker, held in state.pop("workers").items()}
            numbers = [n for held in workers.values() for n in (held.since, held.seen, held.samples)]
            numbers += [state[name] for name in ("shard_size", "lease_commits", "commits", "samples", "frontier")]
            is_whole = len(state_dict) == len(_FIELDS) and type(state["data_fingerprint"]) is str
            if not is_whole or not all(map(_is_count, numbers)) or not state["shard_size"]:
                raise ValueError
            if not all(held.since <= held.seen <= state["commits"] for held in workers.values()):
                raise ValueError
            if sum(held.samples for held in workers.values()) > state["samples"]:
                raise ValueError
            returned = _read_intervals(state.pop("returned"))
            workers = {w: replace(held, leases=_read_intervals(held.leases)) for w, held in workers.items()}
            return cls(**state, returned=returned, workers=workers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is not the state of a data ledger ({str(error) or 'a value is not what it must be'})"
            ) from error

    def digest(self) -> str:
        """16 hexadecimal digits that differ when anything in the ledger differs."""
        return hashlib.sha256(json.dumps(self.state_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def _wanted(self, worker: str, proposal: object, own: WorkerLeases) -> int:
        """The samples that a worker shall have ahead of its committed ones."""
        read = Proposal.read(proposal)
        if read is None:
            return 0
        uncommitted = 0 if self.check(worker, proposal) else read.samples - own.samples
        return max(0, uncommitted) + read.demand


_FIELDS = [each.name for each in fields(Ledger)]
_SAVED_AS = {"data_fingerprint": "corpus", "workers": "holdings"}  # in files: their former names


class _Free:
    """The samples that can be leased: the parts that were given back, then the rest of the order."""

    def __init__(self, shard_size: int, returned: Iterable[Interval], frontier: int) -> None:
        self.shard_size, self.returned, self.frontier = shard_size, sorted(returned), frontier

    def take(self, samples: int) -> list[Interval]:
        """Return leases of at least so many samples, up to the end of a shard."""
        taken = []
        while samples > 0:
            fresh = not self.returned
            start, end = (self.frontier, None) if fresh else self.returned.pop(0)
            stop = -(-(start + samples) // self.shard_size) * self.shard_size
            if end is None:
                self.frontier = stop
            elif stop < end:
                self.returned.insert(0, (stop, end))
            else:
                stop = end
            taken.append((start, stop))
            samples -= stop - start
        return taken


def length(intervals: Iterable[Interval]) -> int:
    """Return how many samples there are in all intervals."""
    return sum(end - start for start, end in intervals)


def join(intervals: Iterable[Interval]) -> Intervals:
    """Return the same samples in the same order, neighbours as one interval."""
    joined: list[Interval] = []
    for start, end in intervals:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


def cut(intervals: Iterable[Interval], first: int, last: int | None = None) -> Intervals:
    """Return the samples from the `first`-th to before the `last`-th (None: the end), counted along the intervals."""
    parts: list[Interval] = []
    before = 0
    for start, end in intervals:
        left = start + max(0, first - before)
        right = end if last is None else min(end, start + last - before)
        if left < right:
            parts.append((left, right))
        before += end - start
    return tuple(parts)


def _read_intervals(value: Any) -> Intervals:
    intervals = tuple((start, end) for start, end in value)
    if not all(_is_count(number) for interval in intervals for number in interval):
        raise ValueError
    return intervals


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is no number here
