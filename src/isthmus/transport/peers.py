"""The collectives that all transports have in common, over flat buffers, with their bytes counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from isthmus.core.types import Peers, Tensors, WorkerGroup
from isthmus.transport.base import Drift
from isthmus.transport.wire import each_from_buffer, from_buffer, num_bytes, to_buffer
from isthmus.transport.worker_group import SINGLE_RANK

_VOTE_BYTES = 9  # one for yes or no, eight of the anchors' hash


class BufferPeers:
    """`Peers` for a transport that moves flat buffers: a subclass gives the three collectives below.

    Bytes are those of the bandwidth-optimal algorithms (Patarasu and Yuan 2009; docs/identities.md, 35), with M
    peers: a ring all-reduce sends and receives 2(M-1)/M of its payload, an all-gather M-1 times its own payload, an
    all-to-all each part once. What a worker keeps for itself costs nothing.
    """

    worker_group: WorkerGroup = SINGLE_RANK  # this worker's ranks

    def __init__(self, rank: int, weights: list[float]) -> None:
        self.rank = rank
        self.size = len(weights)
        self.weights = weights
        self.sent_bytes = 0
        self.received_bytes = 0

    def all_reduce_mean(self, tensors: Tensors) -> Tensors:
        """Return the weighted mean. A worker of weight 0 sends zeros, so that its NaN cannot spread."""
        if any(tensor.dtype != torch.float32 for tensor in tensors):
            raise TypeError("all_reduce_mean takes float32 tensors")
        flat = to_buffer(tensors).view(torch.float32)
        weight = self.weights[self.rank]
        flat = flat.mul_(weight) if weight > 0 else flat.zero_()
        if self.size > 1 and len(flat):
            flat = self._all_reduce(flat)
            self._count(ring_bytes(4 * len(flat), self.size), ring_bytes(4 * len(flat), self.size))
        return from_buffer(flat.view(torch.uint8), tensors)

    def all_gather(self, tensors: Tensors) -> list[Tensors]:
        """Return all peers' tensors in rank order; see `Peers.all_gather`."""
        buffer = to_buffer(tensors)
        size = len(buffer)
        if self.size > 1 and size:
            buffer = self._all_gather(buffer)
            self._count((self.size - 1) * size, (self.size - 1) * size)
        return each_from_buffer(buffer, tensors, self.size)

    def all_to_all(self, parts: list[Tensors]) -> list[Tensors]:
        """Send part i to rank i, and return what each rank sent here; see `Peers.all_to_all`."""
        buffer = to_buffer([tensor for part in parts for tensor in part])
        if self.size > 1 and len(buffer):
            sizes = [num_bytes(part) for part in parts]
            own = sizes[self.rank]
            buffer = self._all_to_all(buffer, sizes)
            self._count(sum(sizes) - own, (self.size - 1) * own)
        return each_from_buffer(buffer, parts[self.rank], self.size)

    def connections_to(self, rank: int) -> int:
        """Return how many connections carry large messages to a peer."""
        return 1

    def exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], num_connections: int | None = None
    ) -> None:
        """Send every peer its buffer, and fill one from every peer, as `isthmus doctor` does to measure the links.

        Args:
            outgoing: by rank, [n] uint8 on the CPU; both ends know n, which may be 0.
            incoming: by rank, likewise.
            num_connections: that carry what this worker sends to a peer; None: all there are.
        """
        raise NotImplementedError

    def all_gather_parts(self, parts: Iterable[Tensors]) -> Iterator[list[Tensors]]:
        """Yield all peers' parts, in order; see `Peers.all_gather_parts`. They cross as one message."""
        own = list(parts)
        everybody = self.all_gather([tensor for part in own for tensor in part])
        yield from _cut(everybody, [len(part) for part in own])

    def all_to_all_parts(self, parts: Iterable[list[Tensors]]) -> Iterator[list[Tensors]]:
        """Yield what each rank sent here, part by part; see `Peers.all_to_all_parts`. They cross as one message."""
        own = list(parts)
        to_each = [[tensor for part in own for tensor in part[rank]] for rank in range(self.size)]
        yield from _cut(self.all_to_all(to_each), [len(part[self.rank]) for part in own])

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum [n] float32 over all peers, with the same bits on all; may overwrite `buffer`."""
        raise NotImplementedError

    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffers of all peers, [n] uint8 each, in rank order: [size * n] uint8."""
        raise NotImplementedError

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Send `sizes[i]` bytes of a uint8 buffer to rank i; return what came from each: [size * sizes[rank]] uint8."""
        raise NotImplementedError

    def _count(self, sent: int, received: int) -> None:
        self.sent_bytes += sent
        self.received_bytes += received


def _cut(everybody: list[Tensors], lengths: list[int]) -> Iterator[list[Tensors]]:
    """Cut everybody's tensors into parts of so many tensors each."""
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        yield [theirs[end - length : end] for theirs in everybody]


def ring_bytes(payload_bytes: int, num_peers: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: 2(M-1)/M of the payload, rounded down."""
    return 2 * (num_peers - 1) * payload_bytes // num_peers


def vote(peers: Peers, ok: bool, fingerprint: bytes) -> bool:
    """Gather all peers' votes and anchor hashes (9 bytes each); return whether all agreed to commit.

    The ranks of a worker agree first, then speak with one voice: so all ranks of all workers come to the same end.

    Raises:
        Drift: on all ranks, when the hashes of the workers with a positive weight differ.
    """
    of_ranks = _ballots(peers.worker_group.all_gather, ok, fingerprint.ljust(_VOTE_BYTES - 1, b"\0"))
    fingerprint = hash_of_worker([ballot[1:] for ballot in of_ranks])
    votes = _ballots(peers.all_gather, all(ballot[0] for ballot in of_ranks), fingerprint)
    hashes = {rank: votes[rank][1:] for rank in range(peers.size) if peers.weights[rank] > 0}
    if len(set(hashes.values())) > 1:
        minority, message = _describe_drift(hashes)
        raise Drift(minority, message)
    return all(ballot[0] for ballot in votes)


def hash_of_worker(hashes: list[bytes]) -> bytes:
    """Return one hash for a worker, of the 8 bytes of each of its ranks; those of a single rank stay as they are."""
    return hashes[0] if len(hashes) == 1 else hashlib.blake2b(b"".join(hashes), digest_size=8).digest()


def _ballots(gather: Callable[[Tensors], list[Tensors]], ok: bool, fingerprint: bytes) -> list[bytes]:
    own = torch.tensor([ok, *fingerprint], dtype=torch.uint8)
    return [bytes(ballot.tolist()) for (ballot,) in gather([own])]


def _describe_drift(hashes: dict[int, bytes]) -> tuple[list[int], str]:
    """Return the minority, and a sentence about it; a tie is decided in favour of the lowest rank."""
    majority = Counter(hashes.values()).most_common(1)[0][0]  # the first seen, i.e. the lowest rank's, in a tie
    minority = [rank for rank, value in hashes.items() if value != majority]
    others = [rank for rank, value in hashes.items() if value == majority]
    return minority, (
        f"the anchors, or what was committed, of {name_workers(minority)} differ from those of {name_workers(others)}: "
        "start again from the last checkpoint, and report this if it comes back"
    )


def name_workers(ranks: list[int]) -> str:
    """Return what to call workers: 'worker 2', or 'workers 0, 1'."""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
