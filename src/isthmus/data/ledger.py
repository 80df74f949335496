"""Who reads which samples: a table that moves only with a commit, so that every sample enters the model once.

The corpus is one endless line of samples, epoch after epoch, in an order that all workers share (`base.Samples`). The
line is cut into shards of a fixed number of samples. A lease is a run of shards that one worker reads, in order; its
start moves on as what was read is committed. Only the open parts of the line need to be written down: everything below
the frontier is committed, but for the leases and for what dead workers gave back. So the table stays small however long
the run, and the order does not depend on how many workers there are or were.

A `Ledger` is a value: `commit` makes the next one and leaves this one as it is. A refused sync has nothing to undo, a
heal replaces one value by another, and the training thread may read it while the communication thread makes the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Interval = tuple[int, int]  # [start, end) on the line of samples
Intervals = tuple[Interval, ...]

MAX_DEMAND = 2**24  # samples a worker may ask for beyond those it has read


@dataclass(frozen=True)
class Claim:
    """What a worker announces before a sync. Samples are counted from the beginning of its holding."""

    since: int = -1  # the commit with which its holding began; -1: it has none
    samples: int = 0  # read when its pseudo-gradient was captured, committed ones included
    demand: int = 0  # samples that it wants to have leased beyond these

    @classmethod
    def read(cls, value: object) -> Claim | None:
        """A claim from what another worker sent; None where it is none."""
        if not isinstance(value, dict) or value.keys() != {"since", "samples", "demand"}:
            return None
        claim = cls(**value)
        fits = _is_count(claim.samples) and _is_count(claim.demand) and claim.demand <= MAX_DEMAND
        return claim if fits and (_is_count(claim.since) or claim == replace(claim, since=-1)) else None


@dataclass(frozen=True)
class Holding:
    """One worker's leases, from the commit at which it first had some until it has been away for too long."""

    since: int = -1
    seen: int = -1  # the last commit at which it was there
    samples: int = 0  # committed since it began
    leases: Intervals = ()  # not committed yet, in the order in which they are read

    def advance(self, samples: int) -> Holding:
        """With everything committed up to the `samples`-th."""
        return replace(self, samples=samples, leases=cut(self.leases, samples - self.samples))


@dataclass(frozen=True)
class Ledger:
    """The replicated table: equal on all workers, bit for bit, after the same commits.

    Attributes:
        corpus: `Samples.fingerprint` of the line that positions are positions in.
        shard_size: samples of a shard; leases end where a shard ends.
        lease_commits: commits that a worker may miss and keep its leases. A straggler's pseudo-gradient rides in its
            next sync, and counts only while nobody else was given its samples; a dead worker's samples merely
            come that many commits later. So a few are better than none, and many would let old samples lie.
        commits: so far, the one that gave the first leases included.
        samples: committed in total; those that are in the anchors.
        frontier: the first position that was never leased.
        returned: open parts that no worker holds, from left to right.
        holdings: by worker.

    Raises:
        ValueError: the parts do not add up, so this is the state of no ledger.
    """

    corpus: str
    shard_size: int = 256
    lease_commits: int = 3
    commits: int = 0
    samples: int = 0
    frontier: int = 0
    returned: Intervals = ()
    holdings: Mapping[str, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = [lease for holding in self.holdings.values() for lease in holding.leases]
        before, num_open = 0, 0
        for start, end in sorted([*self.returned, *held]):
            if not before <= start < end <= self.frontier or end % self.shard_size:
                raise ValueError(f"ledger: samples {start} to {end} are leased twice, or not a part of a shard")
            before, num_open = end, num_open + end - start
        if self.samples != self.frontier - num_open:
            raise ValueError(f"ledger: {self.samples} samples committed, but {self.frontier - num_open} by its table")

    def check(self, worker: str, claim: object) -> str:
        """Why a worker's claim cannot be committed; empty where it can.

        All workers check all claims before they average: one that is refused takes no part in the mean.
        """
        read = Claim.read(claim)
        if read is None:
            return f"{worker}: no claim, or one that cannot be read"
        holding = self.holdings.get(worker, Holding())
        if read.since != holding.since:
            return f"{worker}: claims samples leased at commit {read.since}, but holds those of {holding.since}"
        if not 0 <= read.samples - holding.samples <= length(holding.leases):
            most = holding.samples + length(holding.leases)
            return f"{worker}: claims to have read {read.samples} samples; {holding.samples} to {most} are possible"
        return ""

    def gain(self, worker: str, claim: object) -> int:
        """Samples that committing a claim adds; raises ValueError where `check` has a reason not to."""
        reason, read = self.check(worker, claim), Claim.read(claim)
        if reason or read is None:
            raise ValueError(f"ledger: {reason}")
        return read.samples - self.holdings.get(worker, Holding()).samples

    def commit(self, claims: Mapping[str, object], contributors: Collection[str]) -> Ledger:
        """The ledger after one more commit.

        Contributors' leases advance to their claims; workers long absent give theirs back; then all present ones
        get what they ask for: first what was given back, then fresh shards.

        Args:
            claims: of all workers present, those without a weight included, by name.
            contributors: the workers whose pseudo-gradients are in the mean.

        Raises:
            ValueError: a contributor's claim is not what `check` accepts.
        """
        number, holdings = self.commits + 1, dict(self.holdings)
        gained = 0
        for worker in sorted(contributors):
            gain = self.gain(worker, claims.get(worker))
            if gain:
                holdings[worker] = holdings[worker].advance(holdings[worker].samples + gain)
                gained += gain
        gone = [w for w, held in holdings.items() if w not in claims and number - held.seen > self.lease_commits]
        free = _Free(
            self.shard_size, [*self.returned, *(x for w in gone for x in holdings.pop(w).leases)], self.frontier
        )
        for worker, claim in sorted(claims.items()):
            holding = replace(holdings.get(worker, Holding(since=number)), seen=number)
            missing = self._wanted(worker, claim, holding) - length(holding.leases)
            holdings[worker] = replace(holding, leases=join([*holding.leases, *free.take(missing)]))
        return replace(
            self,
            commits=number,
            samples=self.samples + gained,
            frontier=free.frontier,
            returned=join(free.returned),
            holdings=holdings,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON: as large as the leases that are open, not as the corpus or the run."""
        state: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return state

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Ledger:
        """The inverse of `state_dict`; raises ValueError for what is not a ledger's state."""
        try:
            state = dict(state_dict)
            holdings = {worker: Holding(**held) for worker, held in state.pop("holdings").items()}
            numbers = [n for held in holdings.values() for n in (held.since, held.seen, held.samples)]
            numbers += [state[name] for name in ("shard_size", "lease_commits", "commits", "samples", "frontier")]
            if not all(_is_count(number) for number in numbers) or not state["shard_size"]:
                raise ValueError
            if not all(held.since <= held.seen <= state["commits"] for held in holdings.values()):
                raise ValueError
            if type(state["corpus"]) is not str or sum(held.samples for held in holdings.values()) > state["samples"]:
                raise ValueError
            returned = _read_intervals(state.pop("returned"))
            holdings = {w: replace(held, leases=_read_intervals(held.leases)) for w, held in holdings.items()}
            ledger = cls(**state, returned=returned, holdings=holdings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is not the state of a data ledger ({str(error) or 'a value is not what it must be'})"
            ) from error
        return ledger

    def digest(self) -> str:
        """16 hexadecimal digits that differ when anything in the ledger differs."""
        return hashlib.sha256(json.dumps(self.state_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def _wanted(self, worker: str, claim: object, holding: Holding) -> int:
        """Samples a worker shall have ahead of its committed ones."""
        read = Claim.read(claim)
        if read is None:
            return 0
        uncommitted = 0 if self.check(worker, claim) else read.samples - holding.samples
        return max(0, uncommitted) + read.demand


class _Free:
    """What can be leased: the parts that were given back, then the rest of the line."""

    def __init__(self, shard_size: int, returned: Iterable[Interval], frontier: int) -> None:
        self.shard_size, self.returned, self.frontier = shard_size, sorted(returned), frontier

    def take(self, samples: int) -> list[Interval]:
        """At least so many samples, up to the end of a shard."""
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
    """Samples in all intervals."""
    return sum(end - start for start, end in intervals)


def join(intervals: Iterable[Interval]) -> Intervals:
    """The same samples in the same order, neighbours as one interval."""
    joined: list[Interval] = []
    for start, end in intervals:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


def cut(intervals: Iterable[Interval], first: int, last: int | None = None) -> Intervals:
    """The samples from the `first`-th to before the `last`-th (None: to the end), counted along the intervals."""
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
