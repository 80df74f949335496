"""Calls that the ranks of a worker make as one: whatever one of them learns of the other workers, all go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.core.types import Peers, State, WorkerGroup
from isthmus.transport import peers as peers_of_one_rank
from isthmus.transport.base import Drift, RankLost, TransportError
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.elastic.peer_group import PeerGroup
from isthmus.transport.heal.fetch import Dial, fetch


def rendezvous(worker_group: WorkerGroup, come: Callable[[], Rendezvous]) -> Rendezvous:
    """Have the first rank come to a rendezvous for all ranks."""
    told = dict[str, Any]()
    if worker_group.rank == 0:
        try:
            found = come()
            told = {"id": found.id, "members": found.members}
        except TransportError as error:
            told = {"problem": str(error)}
    told = worker_group.all_gather_object(told)[0]
    if "problem" in told:
        raise TransportError(told["problem"])
    return Rendezvous(**told)


def connect_peers(
    worker_group: WorkerGroup, peer_group: PeerGroup, found: Rendezvous, names: list[str], weights: list[float]
) -> Peers:
    """Connect every rank with its peers, or none of them; see `PeerGroup.peers`."""
    problem = ""
    try:
        peers = peer_group.peers(found, names, weights)
    except TransportError as error:
        problem = str(error)
    problems = list(filter(None, worker_group.all_gather_object(problem)))
    if problems:
        peer_group.close()
        raise TransportError(problems[0])
    peers.worker_group = worker_group
    return peers


@dataclass(frozen=True)
class VoteResult:
    """The result of a vote, as one rank saw it."""

    committed: bool = False
    drift: str = ""  # which workers differ from which
    drifted: bool = False  # this worker is one of those that differ from the majority
    problem: str = ""  # why this rank did not see the result


def vote_as_one(worker_group: WorkerGroup, peers: Peers, ok: bool, fingerprint: bytes) -> VoteResult:
    """Vote, and return the result, or raise `TransportError` where no rank of this worker saw it.

    A worker sends one and the same ballot from all of its ranks, so what any of them saw holds for all.
    """
    try:
        result = VoteResult(committed=peers_of_one_rank.vote(peers, ok, fingerprint))
    except RankLost:
        raise
    except Drift as drift:
        result = VoteResult(drift=str(drift), drifted=peers.rank in drift.ranks)
    except TransportError as error:
        result = VoteResult(problem=str(error))
    results = [VoteResult(**theirs) for theirs in worker_group.all_gather_object(asdict(result))]
    seen = [theirs for theirs in results if not theirs.problem]
    if not seen:
        raise TransportError(results[0].problem)
    return seen[0]


def fetch_state(worker_group: WorkerGroup, donors: dict[str, Dial], **terms: Any) -> tuple[State | None, str]:
    """Fetch each rank's part of one state, or return why that failed; `terms` are those of `heal.fetch`.

    The donors train on while they are asked. What they give to different ranks belongs together where no sync began or
    ended in between ("consistency"); steps are then those of the last one asked.
    """
    state, problem = dict[str, Any](), ""
    try:
        state = fetch(donors, want=None, **terms).state
    except TransportError as error:
        problem = str(error)
    parts = worker_group.all_gather_object(
        {"problem": problem, "consistency": state.get("consistency"), "inner_steps": state.get("inner_steps")}
    )
    problem = next((part["problem"] for part in parts if part["problem"]), "")
    if not problem and len({part["consistency"] for part in parts}) > 1:
        problem = "the run went on between what its ranks were given"
    if problem:
        return None, problem
    return state | {"inner_steps": max(part["inner_steps"] for part in parts)}, ""
