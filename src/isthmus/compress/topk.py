"""The largest values of every chunk, their indices Elias-Fano coded, their values through any other codec."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import override

from isthmus.compress.base import Codec, slices
from isthmus.compress.packing import pack_sorted, sorted_bytes, unpack_sorted
from isthmus.compress.quantize import Quantize
from isthmus.core.kernels import run_kernel
from isthmus.core.types import Peers, State, UserError


@dataclass(frozen=True)
class TopK(Codec):
    """The `keep` largest magnitudes of every `chunk` values (SparseLoCo, arXiv 2508.15706).

    Exactly `keep` entries are sent: of equal magnitudes the first. A value that is not finite counts as the
    largest, so it is always sent. A message with impossible indices decodes to NaN.
    """

    keep: int = 64  # values kept of each chunk
    chunk: int = 4096  # values of a row
    # codec of the kept values, in the order of their indices; its row must divide `keep`
    values: Codec = field(default_factory=lambda: Quantize(bits=2, block=64, scale_bits=8))
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.chunk <= 2**24:
            raise UserError(f"topk: need 1 <= keep <= chunk <= 2**24, not keep {self.keep} and chunk {self.chunk}")
        if not isinstance(self.values, Codec) or self.keep % self.values.row:
            raise UserError(f"topk: values must be a codec whose row or block divides keep {self.keep}: {self.values}")

    @property
    @override
    def row(self) -> int:
        return self.chunk

    @property
    @override
    def row_bytes(self) -> int:
        return self._index_bytes + self.keep // self.values.row * self.values.row_bytes

    @property
    def _index_bytes(self) -> int:
        return sorted_bytes(self.keep, self.chunk)

    @override
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        indices = self._select(rows)
        kept = rows.gather(1, indices).view(-1, self.values.row)
        return self._join(indices, self.values.encode(kept, generator))

    @override
    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        indices = self._select(rows)
        kept = rows.gather(1, indices).view(-1, self.values.row)
        kept_residual = torch.empty_like(kept)
        values = self.values.encode_with_residual(kept, kept_residual, generator)
        residual.copy_(rows).scatter_(1, indices, kept_residual.view(indices.shape))
        return self._join(indices, values)

    @override
    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """[num_rows, row_bytes] uint8 -> [num_rows, chunk] float32, zero where nothing was sent."""
        return self.decode_mean([payload], [1.0])

    @override
    def decode_mean(self, payloads: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """Return the weighted mean, [num_rows, chunk] float32, in work that grows with what was sent alone."""
        mean = torch.zeros(len(payloads[0]), self.chunk, device=payloads[0].device)
        for payload, weight in zip(payloads, weights, strict=True):
            indices, kept = self._unpack(payload)
            mean.scatter_add_(1, indices, kept.mul_(weight))
        return mean

    def _unpack(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices and values of kept entries, [num_rows, keep] each; values are NaN where indices cannot be."""
        indices, valid = unpack_sorted(payload[:, : self._index_bytes], self.keep, self.chunk)
        values = payload[:, self._index_bytes :].reshape(-1, self.values.row_bytes)
        return indices, torch.where(valid, self.values.decode(values).view(len(payload), self.keep), torch.nan)

    def _join(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the payload of kept entries, given their values as payloads."""
        return torch.cat(
            [pack_sorted(indices, self.chunk), values.view(len(indices), self.row_bytes - self._index_bytes)], dim=1
        )

    def _select(self, rows: torch.Tensor) -> torch.Tensor:
        """Increasing indices of the largest magnitudes, [num_rows, keep] int64."""
        indices = rows.new_empty(len(rows), self.keep, dtype=torch.int64)
        if run_kernel("largest", [rows, indices], self.chunk, self.keep):
            return indices
        return torch.cat([_largest(part, self.keep) for part in slices(rows)])

    @override
    def _generator(self, state: State, peers: Peers, device: torch.device) -> torch.Generator | None:
        return self.values._generator(state, peers, device)


def _largest(rows: torch.Tensor, keep: int) -> torch.Tensor:
    """Magnitude bits above, distance from the end below: no two keys are equal, and NaN is above infinity."""
    length = rows.shape[1]
    key = (rows.view(torch.int32) & 0x7FFFFFFF).long().bitwise_left_shift_(length.bit_length())
    key |= torch.arange(length - 1, -1, -1, device=rows.device)
    return key.topk(keep, dim=1, sorted=False).indices.sort(dim=1).values
