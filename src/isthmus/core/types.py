"""The words every floor of the house shares: tensors, state, peers, reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Tensors = list[torch.Tensor]
State = dict[str, Any]  # plain values, tensors and dicts of them; its tensors are replaced, never mutated


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong and what to do."""


class Peers(Protocol):
    """The workers of one sync, seen from this rank. Every call blocks until all of them made it.

    Where a worker has several ranks, each has peers of its own: the ranks of the other workers that hold the same
    part of the model. `sent_bytes` and `received_bytes` count what this rank really put on and took off the wire
    between workers since the quorum was formed; a call that fails raises `isthmus.transport.base.TransportError`.
    """

    rank: int  # index of this worker among the peers
    size: int  # number of peers
    weights: list[float]  # each worker's share, summing to 1; 0 for one that has just joined
    sent_bytes: int
    received_bytes: int

    def mean(self, tensors: Tensors) -> Tensors:
        """Weighted mean of everybody's float32 tensors (dense all-reduce), the same bits on every peer."""
        ...

    def gather(self, tensors: Tensors) -> list[Tensors]:
        """Everybody's tensors in rank order; shapes and dtypes must be equal on all peers."""
        ...

    def exchange(self, parts: list[Tensors]) -> list[Tensors]:
        """All-to-all: part i goes to rank i; returns the part every rank sent to this one, in rank order.

        All parts that go to one rank have equal shapes and dtypes on all senders: what arrives looks
        like this rank's own `parts[rank]`.
        """
        ...

    def gather_inside(self, tensors: Tensors) -> list[Tensors]:
        """Those of all ranks of this worker, in rank order; shapes and dtypes must be equal. Only its own if alone."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync of one fragment did, as seen by this worker."""

    outer_step: int  # number of this sync, counted over all fragments
    fragment: str
    committed: bool
    num_peers: int
    sent_bytes: int  # by all ranks of this worker
    received_bytes: int
    seconds: float  # quorum to commit, by the transport's clock
    hidden_seconds: float  # the part of it during which this worker went on training
    norm: float  # Euclidean norm of the mean pseudo-gradient, over all ranks of a worker; nan when refused
    cosine: float  # between the mean and this worker's own pseudo-gradient; nan when refused
    effort: float = 1.0  # what the messages took of the largest that the compressor sends; the next round is as short
    reason: str = ""  # why it was refused; empty when committed
    left_out: dict[int, str] = field(default_factory=dict)  # rank among the peers: why its contribution was not used
