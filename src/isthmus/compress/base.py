"""How a mean is taken in few bytes: the compressor protocol, and codecs that average in one or two shots."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from typing_extensions import override

from isthmus.core.types import Peers, State, Tensors

_SLICE_VALUES = 1 << 17
_PART_VALUES = 1 << 20  # of a message: decoded while the next ones come in


class NotFinite(Exception):
    """Some workers' messages hold values that are not finite. Raised on all peers alike, after the same collectives."""

    def __init__(self, ranks: list[int]) -> None:
        names = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(f"the message of {names} is not finite")
        self.ranks = ranks


class Compressor(Protocol):
    """Takes the weighted mean of everybody's tensors over a slow link. A frozen value; memory lives in `state`."""

    @property
    def replicated(self) -> bool:
        """Whether every peer gets the same mean, bit for bit."""
        ...

    def message_fraction(self, state: State) -> float:
        """Return the size of the last message over that of the largest, in (0, 1], alike on all peers."""
        return 1.0

    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        """Return (weighted mean over peers, residual: the part of `local` that was not sent).

        Both are float32 in the shapes of `local`; without `with_residual` there is no residual, but an empty list, and
        all else is the same. The mean equals the weighted mean of `local - residual` over
        peers (robust rules, in `robust.py`, take another mean of them). Peers of weight 0 have no effect. Entries of
        `state` may be replaced; its tensors are never mutated, so that the caller can throw a refused sync's copy away.

        Raises:
            NotFinite: names the workers to blame where the compressor can tell; where not, the mean is not finite.
        """
        ...


class Codec(Compressor):
    """A compressor that writes rows of `row` float32 values as rows of `row_bytes` bytes.

    Rows have a fixed size in bytes, so messages need no headers, sizes follow from shapes, and a mean over
    more than two workers splits by rows: each worker owns 1/M of them (two shots, 2(M-1)/M payloads instead
    of M-1). A subclass is a frozen dataclass that gives `row`, `row_bytes`, `encode` and `decode`; it may
    also replace `to_rows` / `from_rows`.
    """

    replicated: ClassVar[bool] = True

    @property
    def sparse(self) -> bool:
        """Whether the mean of messages holds more than a message can: gather while there are few workers."""
        return False

    @property
    def row(self) -> int:
        """The number of values in a row."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """The number of bytes that an encoded row takes."""
        raise NotImplementedError

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Encode [num_rows, row] float32 as [num_rows, row_bytes] uint8; `generator` feeds stochastic rounding."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """Decode [num_rows, row_bytes] uint8 to [num_rows, row] float32, in memory of its own."""
        raise NotImplementedError

    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Return `encode(rows, generator)`, and write `rows` less what that decodes to into `residual`.

        The residual has the shape of `rows`, float32, and no memory in common with them.
        """
        payload = self.encode(rows, generator)
        torch.sub(rows, self.decode(payload), out=residual)
        return payload

    def decode_mean(self, payloads: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """Return the weighted mean of what payloads decode to, summed in this order, [num_rows, row] float32.

        Product and sum are rounded one after the other, never fused: the same bits on every kind of machine.
        """
        mean = self.decode(payloads[0]).mul_(weights[0])
        for payload, weight in zip(payloads[1:], weights[1:], strict=True):
            mean += self.decode(payload).mul_(weight)
        return mean

    def to_rows(self, tensors: Tensors) -> torch.Tensor:
        """Lay tensors out as [num_rows, row] float32.

        Tensors that fill whole rows keep rows of their own; the others are joined end to end behind them and
        padded with zeros once.
        """
        flat = [tensor.reshape(-1).float() for tensor in _by_fit(tensors, self.row)]
        padding = -sum(tensor.numel() for tensor in flat) % self.row
        if padding:
            flat.append(flat[0].new_zeros(padding))
        joined = torch.cat(flat) if len(flat) > 1 else (flat[0] if flat else torch.empty(0))
        return joined.view(-1, self.row)

    def from_rows(self, rows: torch.Tensor, like: Tensors) -> Tensors:
        """Undo `to_rows`: return float32 tensors in the shapes of `like`, which take over the memory of `rows`."""
        sizes = [tensor.numel() for tensor in _by_fit(like, self.row)]
        views = rows.reshape(-1)[: sum(sizes)].split_with_sizes(sizes)
        fitting = iter([view for view in views if view.numel() % self.row == 0])
        joined = iter([view for view in views if view.numel() % self.row != 0])
        return [next(joined if tensor.numel() % self.row else fitting).view(tensor.shape) for tensor in like]

    @override
    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        rows = self.to_rows(local)
        generator = self._generator(state, peers, rows.device)
        shots = self._one_shot if gathers(self, peers.size) else self._two_shots
        residual = torch.empty_like(rows) if with_residual else None
        received, mean = shots(rows, residual, peers, generator)
        if not is_finite(mean):
            self._blame(received, peers)
        return self.from_rows(mean, local), [] if residual is None else self.from_rows(residual, local)

    def encode_message(
        self, rows: torch.Tensor, residual: torch.Tensor | None, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Return `encode(rows, generator)`, and fill `residual` where one is wanted."""
        if residual is None:
            return self.encode(rows, generator)
        return self.encode_with_residual(rows, residual, generator)

    def _one_shot(
        self, rows: torch.Tensor, residual: torch.Tensor | None, peers: Peers, generator: torch.Generator | None
    ) -> tuple[list[list[Tensors]], torch.Tensor]:
        """Send everybody the whole message; returns what came, part by part, and the mean."""
        mean, received = torch.empty_like(rows), list[list[Tensors]]()
        messages = (
            [self.encode_message(rows[here], None if residual is None else residual[here], generator)]
            for here in self._parts(len(rows))
        )
        for everybody, here in zip(peers.all_gather_parts(messages), self._parts(len(rows)), strict=True):
            mean[here] = self._weighted_mean(everybody, peers.weights)
            received.append(everybody)
        return received, mean

    def _two_shots(
        self, rows: torch.Tensor, residual: torch.Tensor | None, peers: Peers, generator: torch.Generator | None
    ) -> tuple[list[list[Tensors]], torch.Tensor]:
        """Send share i to its owner, worker i; get from all owners the encoded means of their shares.

        What the owner's second encoding loses goes, divided by its weight, into the owner's residual: the mean
        of what was not sent stays exact (the server error of CocktailSGD). So workers of weight 0 own no share.
        Returns what came here, part by part, and the mean.
        """
        mean, received = torch.empty_like(rows), list[list[Tensors]]()
        own, sizes = self.encode_message(rows, residual, generator), part_sizes(len(rows), peers.weights)
        shares = own.split_with_sizes(sizes)
        own_rest = None if residual is None else residual.split_with_sizes(sizes)[peers.rank]
        parts = ([[share[here]] for share in shares] for here in self._parts(max(sizes)))

        def encoded_means() -> Iterator[torch.Tensor]:
            for messages, here in zip(peers.all_to_all_parts(parts), self._parts(max(sizes)), strict=True):
                received.append(messages)
                part_mean = self._weighted_mean(messages, peers.weights)
                lost = None if own_rest is None else torch.empty_like(part_mean)
                encoded = self.encode_message(part_mean, lost, generator)
                if own_rest is not None and lost is not None and len(encoded):
                    own_rest[here] += lost / peers.weights[peers.rank]
                yield encoded

        self._gather_shares(encoded_means(), mean.split_with_sizes(sizes), peers)
        return received, mean

    def _gather_shares(self, own: Iterable[torch.Tensor], shares: Sequence[torch.Tensor], peers: Peers) -> None:
        """Fill everybody's share, [rows, row] float32 each, given the encoded parts of this worker's own."""
        parts = self._parts(max(map(len, shares)))

        def padded() -> Iterator[Tensors]:  # gather needs equal shapes
            for part, here in zip(own, parts, strict=True):
                yield [torch.cat([part, part.new_zeros(here.stop - here.start - len(part), self.row_bytes)])]

        for everybody, here in zip(peers.all_gather_parts(padded()), parts, strict=True):
            for share, (part,) in zip(shares, everybody, strict=True):
                share[here] = self.decode(part[: len(share[here])])

    def _parts(self, num_rows: int) -> list[slice]:
        """Return the parts in which so many rows cross."""
        step = max(1, _PART_VALUES // self.row)
        return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]

    def _blame(self, received: list[list[Tensors]], peers: Peers) -> None:
        """Tell everybody whose message, or part of it, is not finite; all peers come here, for their means are equal.

        Raises:
            NotFinite: somebody's is. Else nobody can be blamed, and the mean shows it.
        """
        seen = [
            weight > 0 and not all(is_finite(self.decode(messages[rank][0])) for messages in received)
            for rank, weight in enumerate(peers.weights)
        ]
        everybody = peers.all_gather([torch.tensor(seen, dtype=torch.uint8)])
        faulty = torch.stack([theirs for (theirs,) in everybody]).amax(0)
        if faulty.any():
            raise NotFinite(faulty.nonzero().flatten().tolist())

    def _weighted_mean(self, messages: list[Tensors], weights: list[float]) -> torch.Tensor:
        """Return the weighted mean in rank order; weight 0 is not decoded, so its NaN cannot spread."""
        counted = [(message, weight) for (message,), weight in zip(messages, weights, strict=True) if weight > 0]
        return self.decode_mean([message for message, _ in counted], [weight for _, weight in counted])

    def _generator(self, state: State, peers: Peers, device: torch.device) -> torch.Generator | None:
        """Return random numbers for stochastic rounding; None where rounding is to the nearest."""
        return None


def gathers(codec: Codec, num_peers: int) -> bool:
    """Whether every message goes to everybody (one shot) instead of through owners of parts (two shots).

    A dense message M-1 times costs more than twice (M-1)/M of one from three workers on. A sparse one keeps
    its small size only when gathered: while M < 2b/s, with b = 4 and s its bytes per value.
    """
    if codec.sparse:
        return num_peers < 2 * 4 * codec.row / codec.row_bytes
    return num_peers <= 2


def is_finite(*tensors: torch.Tensor) -> bool:
    """Whether all values are finite: equal bits give the same answer on every machine. A GPU is waited for once."""
    extremes = [extreme for tensor in tensors if tensor.numel() for extreme in tensor.aminmax()]  # NaN wins both
    return not extremes or bool(torch.stack(extremes).isfinite().all())


def gather_parts(encoded: torch.Tensor, sizes: list[int], peers: Peers) -> torch.Tensor:
    """Gather everybody's part [sizes[rank], row_bytes], joined in rank order: the second of two shots."""
    padded = encoded.new_zeros(max(sizes), encoded.shape[1])  # gather needs equal shapes
    padded[: len(encoded)] = encoded
    return torch.cat([part[:size] for (part,), size in zip(peers.all_gather([padded]), sizes, strict=True)])


def slices(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut rows into parts whose intermediate results stay in the cache, or on an accelerator do not fill its memory."""
    values = _SLICE_VALUES if rows.device.type == "cpu" else _SLICE_VALUES << 9
    return torch.split(rows, max(1, values // math.prod(rows.shape[1:])))


def part_sizes(num_rows: int, weights: list[float]) -> list[int]:
    """Return how many rows each worker owns in two shots: equal parts for those of positive weight."""
    num_owners = sum(weight > 0 for weight in weights)
    bounds = [num_rows * owner // num_owners for owner in range(num_owners + 1)]
    owned = iter([end - begin for begin, end in pairwise(bounds)])
    return [next(owned) if weight > 0 else 0 for weight in weights]


def _by_fit(tensors: Tensors, row: int) -> Tensors:
    """Return the tensors that fill whole rows, then the others."""
    return sorted(tensors, key=lambda tensor: tensor.numel() % row != 0)
