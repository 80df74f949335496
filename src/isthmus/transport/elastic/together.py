"""What the ranks of a worker do as one: whatever one of them learns from the world outside, all of them go by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from isthmus.core.types import Peers, State, WorkerGroup
from isthmus.transport.base import Drift, RankLost, TransportError
from isthmus.transport.elastic.membership import Card, Meeting, Membership
from isthmus.transport.heal.fetch import fetch
from isthmus.transport.peers import vote as vote_at_one_place


def meet(worker_group: WorkerGroup, membership: Membership, card: Card, wait_seconds: float) -> Meeting:
    """The first rank shows the worker's card; all go by what it was shown. See `Membership.meet`."""
    card, told = card | {"contacts": worker_group.all_gather_object(membership.contact)}, dict[str, Any]()
    if worker_group.rank == 0:
        try:
            meeting = membership.meet(card, wait_seconds)
            told = {"id": meeting.id, "cards": meeting.cards}
        except TransportError as error:
            told = {"problem": str(error)}
    told = worker_group.all_gather_object(told)[0]
    if "problem" in told:
        raise TransportError(told["problem"])
    return Meeting(**told)


def gather_around(
    worker_group: WorkerGroup, membership: Membership, meeting: Meeting, names: list[str], weights: list[float]
) -> Peers:
    """Every rank with those at its own place, or none of them. See `Membership.gather_around`."""
    problem = ""
    try:
        peers = membership.gather_around(meeting, names, weights)
    except TransportError as error:
        problem = str(error)
    problems = list(filter(None, worker_group.all_gather_object(problem)))
    if problems:
        membership.part()
        raise TransportError(problems[0])
    peers.worker_group = worker_group
    return peers


@dataclass(frozen=True)
class End:
    """Of a vote, as one rank saw it."""

    committed: bool = False
    drift: str = ""  # who differs from whom
    drifted: bool = False  # this worker is one of those who differ from the majority
    problem: str = ""  # why this rank did not see it


def vote(worker_group: WorkerGroup, peers: Peers, ok: bool, fingerprint: bytes) -> End:
    """How the vote ended.

    A worker sends one and the same ballot from all of its ranks, so what any of them saw holds for all.

    Raises:
        TransportError: no rank of this worker saw it.
    """
    try:
        end = End(committed=vote_at_one_place(peers, ok, fingerprint))
    except RankLost:
        raise
    except Drift as drift:
        end = End(drift=str(drift), drifted=peers.rank in drift.ranks)
    except TransportError as error:
        end = End(problem=str(error))
    ends = [End(**theirs) for theirs in worker_group.all_gather_object(asdict(end))]
    seen = [theirs for theirs in ends if not theirs.problem]
    if not seen:
        raise TransportError(ends[0].problem)
    return seen[0]


def fetch_parts(worker_group: WorkerGroup, donors: list[str], **terms: Any) -> tuple[State | None, str]:
    """Each rank its part of one state of the run, else why not; `terms` as for `heal.fetch`.

    The donors train on while they are asked. What they give to different ranks belongs together where no sync began or
    ended in between ("consistency"); steps are then those of the last one asked.
    """
    state, problem = dict[str, Any](), ""
    try:
        state = fetch(donors, want=None, **terms).state
    except TransportError as error:
        problem = str(error)
    parts = worker_group.all_gather_object(
        {
            "problem": problem,
            "consistency": state.get("consistency"),
            "inner_steps": state.get("inner_steps"),
        }
    )
    problem = next((part["problem"] for part in parts if part["problem"]), "")
    if not problem and len({part["consistency"] for part in parts}) > 1:
        problem = "the run went on between what its ranks were given"
    if problem:
        return None, problem
    return state | {"inner_steps": max(part["inner_steps"] for part in parts)}, ""
