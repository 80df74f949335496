"""The commits that led to a worker's state: what tells who is ahead, who is behind and who went another way."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from isthmus.core.types import State
from isthmus.transport.base import ReplicatedState
from isthmus.transport.elastic.membership import Rendezvous


class CommitHistory:
    """How many commits this worker's state holds, which they were, who was in them, and what moved with them."""

    def __init__(self, replicated_state: ReplicatedState | None) -> None:
        self.replicated_state = replicated_state
        self.version = 0  # the number of commits
        self.chain = "new"  # equal where the same commits followed one another
        self.members = list[str]()  # the workers that made the last commit; empty where that is not known
        self._contributed: dict[str, int] = {}  # by worker: the last sync that its pseudo-gradient was in

    def append(self, outer_step: int, rendezvous: Rendezvous, names: list[str], weights: list[float]) -> None:
        """Take note of a commit: its rendezvous, the workers that took part, and the weight of each in the mean."""
        contributors = [name for name, weight in zip(names, weights, strict=True) if weight > 0]
        self.chain = extend_chain(self.chain, outer_step, rendezvous.id, names)
        self.version += 1
        self.members = list(names)
        self._contributed |= dict.fromkeys(contributors, outer_step)
        proposals = {name: rendezvous.members[name]["proposal"] for name in names}
        if (moved := self.moved_by(proposals)) is not None:
            moved.commit(proposals, contributors)

    def moved_by(self, proposals: dict[str, Any]) -> ReplicatedState | None:
        """Return the replicated state if this sync moves it; a worker that has just caught up proposes nothing."""
        return self.replicated_state if any(proposal is not None for proposal in proposals.values()) else None

    def mark_drifted(self) -> None:
        """Make this worker one that has to catch up: its anchors are not the others'."""
        self.chain = "drifted"

    def fingerprint(self, anchors: bytes) -> bytes:
        """Return the anchors' hash as one of the replicated state, too; empty where nothing is to be compared."""
        if self.replicated_state is None or not anchors:
            return anchors
        replicated = json.dumps(self.replicated_state.state_dict(), sort_keys=True).encode()
        return hashlib.blake2b(anchors + replicated, digest_size=len(anchors)).digest()

    def holds(self, worker: str, outer_step: int) -> bool:
        """Return whether a worker's contribution to a sync is in the state."""
        return self._contributed.get(worker, -1) >= outer_step

    def state_dict(self) -> State:
        """Return plain values that `load_state_dict` takes."""
        state: State = {"version": self.version, "chain": self.chain, "contributed": dict(self._contributed)}
        state["members"] = list(self.members)
        if self.replicated_state is not None:
            state["replicated_state"] = self.replicated_state.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a saved or fetched state."""
        self.version, self.chain = state_dict["version"], state_dict["chain"]
        self.members = list(state_dict.get("members", []))  # former checkpoints do not say
        self._contributed = dict(state_dict["contributed"])
        if self.replicated_state is not None:
            self.replicated_state.load_state_dict(state_dict["replicated_state"])


def extend_chain(chain: str, outer_step: int, rendezvous_id: str, names: list[str]) -> str:
    """Return the chain after one more commit: 16 hexadecimal digits."""
    text = "\n".join([chain, str(outer_step), rendezvous_id, *names])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
