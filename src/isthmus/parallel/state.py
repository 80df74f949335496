"""Local state: the slices of sharded weights, and of their optimizer's state, that one rank saves and loads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isthmus.core.fragment import is_dtensor, local_view, sharded_like
from isthmus.core.torch_internals import tree_map_only
from isthmus.core.types import State


@dataclass(frozen=True)
class TensorSlice:
    """The slice of a whole tensor that one rank holds; empty where nothing is left for it."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that is all of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSlice:
        """Return this rank's slice of a tensor that `apply_tp`, and after it `apply_fsdp`, may have split."""
        offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            placements: list[Any] = list(tensor.placements)
            for axis, placement in reversed(list(enumerate(placements))):  # tp, the last one, came first
                if placement.is_replicate():
                    continue
                dim = placement.dim
                size = -(-sizes[dim] // mesh.size(axis))  # as torch.chunk: the last ones get less, or nothing
                begin = min(mesh.get_local_rank(axis) * size, sizes[dim])
                offsets[dim] += begin
                sizes[dim] = min(size, sizes[dim] - begin)
        local = local_view(tensor)
        assert list(local.shape) == sizes or local.numel() == math.prod(sizes) == 0  # FSDP2 has rows of no columns
        return cls(tuple(tensor.shape), tuple(offsets), tuple(local.shape))


class StoredTensor:
    """A tensor in a safetensors file; only the slices that are asked for are read."""

    def __init__(self, slices: Any) -> None:
        self._slices, self.shape = slices, tuple(slices.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of the tensor."""
        values: torch.Tensor = self._slices[index]
        return values


def assemble_slice(wanted: TensorSlice, saved: Iterable[tuple[TensorSlice, StoredTensor]]) -> torch.Tensor:
    """Assemble a slice of a tensor from the slices that other ranks saved; each distinct one is read once."""
    distinct = dict(saved)
    _, some = next(iter(distinct.items()))
    result = torch.empty(wanted.sizes, dtype=some[tuple(slice(0, 0) for _ in wanted.sizes)].dtype)
    for piece, stored in distinct.items():
        low = [max(a, b) for a, b in zip(wanted.offsets, piece.offsets, strict=True)]
        ends = [[o + n for o, n in zip(each.offsets, each.sizes, strict=True)] for each in (wanted, piece)]
        high = [min(a, b) for a, b in zip(*ends, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            result[_index(low, high, wanted.offsets)] = stored[_index(low, high, piece.offsets)]
    return result


def _index(low: list[int], high: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; tied parameters stand there once, by their first name."""
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def local_state(state: State) -> State:
    """Replace every sharded tensor of a state by this rank's own part of it, which shares its memory."""
    local: State = tree_map_only(torch.Tensor, local_view, state)
    return local


def load_local_model(model: nn.Module, state: State) -> None:
    """Copy a state into the model, as `local_state(named_tensors(model))` made it on the same mesh."""
    own = named_tensors(model)
    if own.keys() != state.keys():
        raise ValueError("the state is of another model")
    with torch.no_grad():
        for name, tensor in own.items():
            local_view(tensor).copy_(state[name])


def sharded_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> State:
    """Shard what `local_state(optimizer.state_dict())` made as the parameters are, for `optimizer.load_state_dict`."""
    params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
    values = {
        number: {name: _sharded_value(params[int(number)], value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": values}


def _sharded_value(param: nn.Parameter, value: Any) -> Any:
    """Shard a value of the optimizer's state as its parameter is; counters stay as they are."""
    if not isinstance(value, torch.Tensor) or value.ndim != param.ndim:
        return value
    return sharded_like(value.to(param.device), param)
