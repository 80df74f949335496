"""Any codec on the cosine coefficients of square tiles."""

import functools
import math
from dataclasses import dataclass

import torch
from typing_extensions import override

from isthmus.compress.base import Codec, slices
from isthmus.core.kernels import run_kernel
from isthmus.core.types import Peers, State, Tensors, UserError


@dataclass(frozen=True)
class DCT(Codec):
    """Orthonormal DCT-II coefficients of tile x tile pieces of matrices, through another codec.

    The transform of DeMo (arXiv 2411.19870), but with padding: there tiles shrink to the divisors of a size.
    Tensors of two and more dimensions are matrices [first, rest], padded with zeros to whole tiles, so a prime size
    costs at most a tile. Vectors, and matrices narrower than a tile, are joined and cut into tiles together.

    Transform and inverse have the same bits on every kind of machine: values are snapped to a grid so fine
    (2**-25 of the tile's largest) and coefficients so short that float64 sums them without rounding, in any order.
    """

    codec: Codec  # sees the coefficients of a tile row by row; its row must divide tile * tile
    tile: int = 64  # side of a tile, a multiple of 8, at most 64

    def __post_init__(self) -> None:
        if not 8 <= self.tile <= 64 or self.tile % 8:
            raise UserError(f"dct: tile {self.tile} must be a multiple of 8 between 8 and 64")
        if not isinstance(self.codec, Codec) or isinstance(self.codec, DCT) or self.tile**2 % self.codec.row:
            raise UserError(f"dct: codec must be one whose row divides tile * tile = {self.tile**2}: {self.codec}")

    @property
    @override
    def sparse(self) -> bool:
        return self.codec.sparse

    @property
    @override
    def row(self) -> int:
        return self.codec.row

    @property
    @override
    def row_bytes(self) -> int:
        return self.codec.row_bytes

    @override
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.codec.encode(rows, generator)

    @override
    def encode_with_residual(
        self, rows: torch.Tensor, residual: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return self.codec.encode_with_residual(rows, residual, generator)

    @override
    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(payload)

    @override
    def decode_mean(self, payloads: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        return self.codec.decode_mean(payloads, weights)

    @override
    def to_rows(self, tensors: Tensors) -> torch.Tensor:
        """Return the coefficients of all tensors, tile after tile, [num_rows, row] float32."""
        num_tiles = self._num_tiles(tensors)
        device = tensors[0].device if tensors else None
        tiles = torch.zeros(sum(num_tiles), self.tile, self.tile, device=device)
        vectors = []
        for tensor, part in zip(tensors, tiles.split_with_sizes(num_tiles)[:-1], strict=True):
            if self._is_matrix(tensor):
                self._paste(part, tensor.reshape(len(tensor), -1))
            else:
                vectors.append(tensor.reshape(-1))
        if vectors:
            joined = torch.cat(vectors)
            tiles.view(-1)[tiles.numel() - num_tiles[-1] * self.tile**2 :][: len(joined)] = joined
        _transform(tiles, inverse=False)
        return tiles.view(-1, self.row)

    @override
    def from_rows(self, rows: torch.Tensor, like: Tensors) -> Tensors:
        """Undo `to_rows`: return float32 tensors in the shapes of `like`, which take over the memory of `rows`."""
        tiles = rows.view(-1, self.tile, self.tile)
        _transform(tiles, inverse=True)
        *parts, joined = tiles.split_with_sizes(self._num_tiles(like))
        vectors = [tensor.numel() for tensor in like if not self._is_matrix(tensor)]
        flat = iter(joined.reshape(-1)[: sum(vectors)].split_with_sizes(vectors))
        return [
            self._cut(part, tensor) if self._is_matrix(tensor) else next(flat).view(tensor.shape)
            for part, tensor in zip(parts, like, strict=True)
        ]

    def _num_tiles(self, tensors: Tensors) -> list[int]:
        """Return the number of tiles of each tensor, 0 for joined ones, then that of all joined ones together."""
        sizes = [math.prod(self._grid(tensor)) if self._is_matrix(tensor) else 0 for tensor in tensors]
        joined = sum(tensor.numel() for tensor in tensors if not self._is_matrix(tensor))
        return [*sizes, -(-joined // self.tile**2)]

    def _is_matrix(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim >= 2 and min(len(tensor), tensor.numel() // max(1, len(tensor))) >= self.tile

    def _grid(self, matrix: torch.Tensor) -> tuple[int, int]:
        """Return how many tiles of a matrix lie below each other, and how many side by side."""
        return -(-len(matrix) // self.tile), -(-matrix.numel() // len(matrix) // self.tile)

    def _paste(self, tiles: torch.Tensor, matrix: torch.Tensor) -> None:
        """Write a matrix into its zeroed tiles [num_tiles, tile, tile]."""
        down, across = self._grid(matrix)
        right, below = across * self.tile - matrix.shape[1], down * self.tile - len(matrix)
        if right or below:
            matrix = torch.nn.functional.pad(matrix, (0, right, 0, below))
        square = matrix.view(down, self.tile, across, self.tile).transpose(1, 2)
        tiles.view(down, across, self.tile, self.tile).copy_(square)

    def _cut(self, tiles: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Undo `_paste`: return the matrix without the padding and in the shape of `like`."""
        down, across = self._grid(like)
        matrix = tiles.view(down, across, self.tile, self.tile).transpose(1, 2)
        matrix = matrix.reshape(down * self.tile, across * self.tile)
        return matrix[: len(like), : like.numel() // len(like)].reshape(like.shape)

    @override
    def _generator(self, state: State, peers: Peers, device: torch.device) -> torch.Generator | None:
        return self.codec._generator(state, peers, device)


@functools.cache
def _cosines(size: int) -> torch.Tensor:
    """Return the orthonormal DCT-II matrix, [size, size] float64, entries rounded to multiples of 2**-24."""
    k, n = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (n + 0.5) * k) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return torch.round(matrix * 2**24) / 2**24


def _transform(tiles: torch.Tensor, inverse: bool) -> None:
    """Replace every tile x [n, n] float32 by M x M^T, M being the cosines or, for the inverse, their transpose.

    With p the power of two below a tile's largest magnitude, its values are rounded to multiples of 2**-25 p, those
    between the two products (below 16 p, as rows of M sum to at most 8) to multiples of 2**-22 p. Each product
    then is a sum of integers below 2**53, times a power of two: exact.
    """
    cosines = _cosines(tiles.shape[1])
    if run_kernel("transform_tiles", [tiles], len(cosines), int(inverse), table=cosines):
        return
    matrix = (cosines.T if inverse else cosines).to(tiles.device)
    for part in slices(tiles):
        largest = part.abs().amax(dim=(1, 2), keepdim=True)
        power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
        snap = power.double() * (1.5 * 2**27)  # adding 1.5 * 2**52 steps and taking them off again rounds to a step
        values = part.double().add_(snap).sub_(snap)
        values = (values @ matrix.T).add_(8 * snap).sub_(8 * snap)
        part.copy_((values.transpose(1, 2) @ matrix.T).transpose(1, 2))
