"""Pure functions of what members tell: who takes part in a sync, with which weight and after how many steps."""

from __future__ import annotations

from collections import Counter
from statistics import median_low
from typing import Literal

from isthmus.transport.elastic.member_info import MemberInfo

Weighting = Literal["uniform", "samples", "samples_per_step"]
_MOST_TIMES_FASTER = 32  # than the median a worker may be, as far as it decides how many steps others take


def leaders(members: dict[str, MemberInfo]) -> list[str]:
    """Return the names of the workers whose state is the run's, in order; all others have to catch up with them.

    The largest version leads: those who hold it saw every commit. Where equal versions have different histories
    (chains), the majority does; a tie goes to the history that holds the first name.
    """
    newest = max(member["version"] for member in members.values())
    chains = {name: member["chain"] for name, member in sorted(members.items()) if member["version"] == newest}
    chain = Counter(chains.values()).most_common(1)[0][0]  # the first seen in a tie
    position = max(members[name]["outer_step"] for name in chains if chains[name] == chain)
    return [name for name in chains if chains[name] == chain and members[name]["outer_step"] == position]


def what_lacks(members: dict[str, MemberInfo], names: list[str]) -> str:
    """Return why the workers `names`, who lead, are too few to commit; empty where they are enough. All judge alike.

    They are as many as each of them needs, and more than half of those who made the last commit, which are counted by
    name: so at most one part of a network that is cut can go on, however many have joined it meanwhile.
    """
    needed = max(members[name]["needed_workers"] for name in names)
    if len(names) < needed:
        return f"{len(names)} of at least {needed} workers are here ({', '.join(names)})"
    for last in sorted({tuple(sorted(members[name]["last_members"])) for name in names}):
        absent = [name for name in last if name not in names]
        if last and 2 * len(absent) >= len(last):
            return (
                f"of the {len(last)} workers that made the last commit {len(last) - len(absent)} are here, and more "
                f"than half must be: start some of {', '.join(absent)} again, or, where they are gone for good, resume "
                "all others with outer.transport.min_workers set"
            )
    return ""


def weigh(members: dict[str, MemberInfo], names: list[str], weighting: Weighting) -> list[float]:
    """Return each worker's share in the mean, summing to 1: 0 for one that has just caught up, unless all have.

    To first order a pseudo-gradient grows with its worker's steps, so equal shares already weigh by steps, which is
    the default; "samples" weighs twice by steps (larger batches count more, but so do faster workers);
    "samples_per_step" weighs by batch size alone (FedNova's normalisation, arXiv 2007.07481, up to its scale).
    """
    all_healed = all(members[name]["healed"] for name in names)

    def amount(member: MemberInfo) -> float:
        if member["healed"] and not all_healed:
            return 0.0
        if weighting == "uniform":
            return 1.0
        return float(member[weighting])

    amounts = [amount(members[name]) for name in names]
    total = sum(amounts)
    return [each / total for each in amounts] if total > 0 else [1 / len(names) for _ in names]


def share_of_fastest(speeds: dict[str, float], name: str) -> float:
    """Return a worker's share of the fastest worker's speed, in (0, 1]: 1 where its own is not known.

    A worker that claims to be far faster than the median counts as `_MOST_TIMES_FASTER` times it, so that nobody can
    keep the others from training.
    """
    own, known = speeds.get(name, 0.0), [each for each in speeds.values() if each > 0]
    if own <= 0:
        return 1.0
    return min(1.0, own / min(max(known), _MOST_TIMES_FASTER * median_low(known)))
