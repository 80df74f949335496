"""Inner optimizers as a configuration describes them: which parameters decay, and which Muon takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from isthmus.core.fragment import is_dtensor
from isthmus.core.types import UserError
from isthmus.inner import muon


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101); decay on matrices only, not on vectors (norms, biases) and not on embeddings."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.betas)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of all trainable parameters."""
        return self.build_for(model, [param for param in model.parameters() if param.requires_grad])

    def build_for(self, model: nn.Module, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of some of the model's parameters."""
        embeddings = _embeddings(model)
        decayed = [param for param in params if param.ndim >= 2 and param not in embeddings]
        others = [param for param in params if param.ndim < 2 or param in embeddings]
        groups = [
            {"params": same, "weight_decay": weight_decay}
            for some, weight_decay in ((decayed, self.weight_decay), (others, 0.0))
            for same in _by_mesh(some)
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class MuonAdamW:
    """Muon for hidden matrices, AdamW for the rest (embeddings, norms, biases, head), as one optimizer.

    Hidden matrices are the matrices and the filters of convolutions inside the model's block lists (`nn.ModuleList`),
    embedding tables excepted. The learning rate was the best of 0.007, 0.01, 0.014 and 0.02 for 3,000 steps of a 0.1M
    GPT-NeoX on bytes (docs/learning.md); MuLoCo's 0.02 (arXiv 2505.23725) is better for a few hundred.
    """

    lr: float = 0.01  # of the matrices
    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float | None = None  # of the rest; None: the same, for update sizes match
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, (self.momentum, *self.betas))

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of all trainable parameters."""
        matrices = hidden_matrices(model)
        if not matrices:
            raise UserError(
                "inner.optimizer: muon is for matrices inside an nn.ModuleList, and this model has none: use adamw"
            )
        hidden = set(matrices)
        others = [param for param in model.parameters() if param.requires_grad and param not in hidden]
        adamw = AdamW(self.lr if self.adamw_lr is None else self.adamw_lr, self.betas, self.eps, self.weight_decay)
        return CombinedOptimizer(
            muon.Muon(matrices, self.lr, self.momentum, self.weight_decay), adamw.build_for(model, others)
        )


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each with its own parameters, as one with the usual `state_dict` and `param_groups`."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all of them."""
        for part in self.parts:
            part.step()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # makes new groups and a new state
        self._share()

    def _share(self) -> None:
        """Let the single optimizers work on the parameter groups and the state of this one."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return trainable matrices and filters inside block lists, embedding tables excepted, in model order."""
    in_blocks = {
        param
        for blocks in model.modules()
        if isinstance(blocks, nn.ModuleList)
        for param in blocks.parameters()
        if param.requires_grad and param.ndim >= 2 and min(muon.matrix_shape(param)) > 1  # else it is a vector
    }
    in_blocks -= _embeddings(model)
    return [param for param in model.parameters() if param in in_blocks]


def _by_mesh(params: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Group parameters that one kernel takes together: they are sharded over the same mesh, or not at all."""
    by_mesh = defaultdict(list)
    for param in params:
        by_mesh[param.device_mesh if is_dtensor(param) else None].append(param)
    return by_mesh.values()


def _embeddings(model: nn.Module) -> set[torch.Tensor]:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {param for table in tables for param in table.parameters()}  # not their `weight`, which may be computed


def _check(lr: float, weight_decay: float, betas: tuple[float, ...]) -> None:
    if lr <= 0 or weight_decay < 0:
        raise UserError(
            f"inner.optimizer: lr is {lr} and weight_decay {weight_decay}; choose lr above 0, weight_decay at least 0"
        )
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"inner.optimizer: momentum and betas are {betas}; choose at least 0 and below 1")
