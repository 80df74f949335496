"""The types that every floor shares: tensors, state, peers, reports."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Tensors = list[torch.Tensor]
State = dict[str, Any]  # plain values, tensors and dicts of them; its tensors are replaced, never mutated


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, to which libraries add paragraphs of advice, or its kind where it is empty."""
    text = str(error).strip()
    return text.split("\n", 1)[0] if text else type(error).__name__


class WorkerGroup(Protocol):
    """The process group of one worker's own ranks, which make the same calls in the same order."""

    rank: int  # of this process in its worker
    size: int  # ranks of the worker

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return the tensors of all ranks in rank order; shapes and dtypes must be equal."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order: whatever JSON can hold."""
        ...

    def check(self) -> None:
        """Raise `isthmus.transport.base.RankLost` where a rank of this worker is gone."""
        ...

    def close(self) -> None:
        """Let go of the other ranks."""
        ...


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
    worker_group: WorkerGroup  # the ranks of this very worker

    def all_reduce_mean(self, tensors: Tensors) -> Tensors:
        """Return the weighted mean of everybody's float32 tensors, the same bits on every peer."""
        ...

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return everybody's tensors in rank order; shapes and dtypes must be equal on all peers."""
        ...

    def all_to_all(self, parts: list[Tensors]) -> list[Tensors]:
        """Send part i to rank i; return the parts that all ranks sent to this one, in rank order.

        All parts that go to one rank have equal shapes and dtypes on all senders: what arrives looks
        like this rank's own `parts[rank]`.
        """
        ...

    def all_gather_parts(self, parts: Iterable[Tensors]) -> Iterator[list[Tensors]]:
        """Gather a message part by part: yield everybody's first part while the next ones are on their way.

        A part crosses as soon as `parts` gives it. All peers give equally many, as `all_gather` takes them.
        """
        ...

    def all_to_all_parts(self, parts: Iterable[list[Tensors]]) -> Iterator[list[Tensors]]:
        """Exchange messages part by part, each as `all_to_all` takes it; see `all_gather_parts`."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """The report of one sync of one fragment, as seen by this worker."""

    outer_step: int  # number of this sync, counted over all fragments; -1 where gradients of the start are averaged
    fragment: str
    committed: bool
    num_peers: int = 0
    sent_bytes: int = 0  # by all ranks of this worker
    received_bytes: int = 0
    seconds: float = 0.0  # quorum to commit, by the transport's clock
    hidden_seconds: float = 0.0  # the part of it during which this worker went on training
    norm: float = math.nan  # Euclidean norm of the mean pseudo-gradient, over all ranks of a worker; nan when refused
    cosine: float = math.nan  # between the mean and this worker's own pseudo-gradient; nan when refused
    message_fraction: float = 1.0  # size of the messages over that of the largest the compressor sends, in (0, 1]
    reason: str = ""  # why it was refused; empty when committed
    left_out: dict[int, str] = field(default_factory=dict)  # rank among the peers: why its contribution was not used
