"""Muon: an optimizer that makes the momentum of every matrix orthogonal before it applies it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from isthmus.core.fragment import is_dtensor, local_view, sharded_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero: kellerjordan.github.io/posts/muon
_STEPS = 5
_BATCH_ELEMENTS = 2**24  # larger batches of matrices only cost memory


class Muon(torch.optim.Optimizer):
    """Muon for matrices (Jordan et al. 2024; update scale and weight decay of arXiv 2502.16982, algorithm 2).

        m <- momentum m + (1 - momentum) g
        o <- orthogonalize(momentum m + (1 - momentum) g)          Nesterov
        w <- (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) o

    The scale gives every update a root mean square of about 0.2, that of AdamW: one learning rate serves both.
    Filters of a convolution are matrices [out, in x kernel], as in Jordan's own.

    `torch.optim.Muon` computes the same, one matrix at a time and always in bfloat16, which takes 26 times as long
    as float32 on CPUs without bfloat16 instructions. Here matrices of one shape go through together.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to all matrices that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for batch in _same_shape(params):
                self._update(batch, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _update(self, params: list[torch.Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """Update matrices that are equal in shape up to transposition."""
        grads = [local_view(param.grad) for param in params if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        buffers = [local_view(self.state[param]["momentum"]) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        nesterov = [
            _whole(own, param).flatten(1)
            for own, param in zip(torch._foreach_lerp(grads, buffers, momentum), params, strict=True)
        ]
        wide = torch.stack([matrix if _is_wide(matrix) else matrix.mT for matrix in nesterov])
        orthogonal = orthogonalize(wide, _working_dtype(wide.device)).to(params[0].dtype).unbind()
        scale = lr * 0.2 * max(matrix_shape(params[0])) ** 0.5
        updates = [
            _own((matrix if _is_wide(param) else matrix.mT).reshape(param.shape), param)
            for matrix, param in zip(orthogonal, params, strict=True)
        ]
        weights = [local_view(param) for param in params]
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, updates, alpha=-scale)


def orthogonalize(matrices: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bring all singular values near 1 by five Newton-Schulz steps of degree five.

    Args:
        matrices: [num_matrices, rows, columns], fastest with rows <= columns.
        dtype: to compute in.

    Returns:
        U S' V^T for every U S V^T, in `dtype`. In exact arithmetic S' lies within [0.68, 1.21] wherever S is above
        0.003 times the norm of the matrix; smaller singular values grow by at most 3.4445 a step.
    """
    a, b, c = _COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x: torch.Tensor = (matrices / norms).to(dtype)  # largest singular value at most 1
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _whole(own: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Gather the matrix of which this rank holds the part `own`, sharded as `param` is; every rank takes part."""
    matrix = sharded_like(own, param)
    return matrix.full_tensor() if is_dtensor(matrix) else matrix


def _own(matrix: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole matrix, sharded as `param` is."""
    if not is_dtensor(param):
        return matrix
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(matrix, param.device_mesh, param.placements, src_data_rank=None).to_local()


def matrix_shape(param: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns of a parameter of two or more dimensions: filters are [out, in x kernel]."""
    return param.shape[0], math.prod(param.shape[1:])


def _is_wide(param: torch.Tensor) -> bool:
    rows, columns = matrix_shape(param)
    return rows <= columns


def _same_shape(params: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Yield batches of matrices that have the same shape up to transposition."""
    by_shape = defaultdict(list)
    for param in params:
        by_shape[*sorted(matrix_shape(param)), param.dtype, param.device].append(param)
    for same in by_shape.values():
        size = max(1, _BATCH_ELEMENTS // same[0].numel())
        for start in range(0, len(same), size):
            yield same[start : start + size]


@cache
def _working_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, which is enough for Newton-Schulz, where the hardware multiplies it; else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer torch only
    return torch.bfloat16 if any(features.get(name) for name in ("avx512_bf16", "amx_bf16")) else torch.float32
