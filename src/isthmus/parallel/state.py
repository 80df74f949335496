"""What a rank saves of sharded weights and of their optimizer: its own part."""

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
class Part:
    """The box that one rank holds of a whole tensor; empty where there is nothing left for it."""

    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """All of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Part:
        """This rank's, as `apply_tp` and after it `apply_fsdp` have left it."""
        offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            for axis, placement in reversed(list(enumerate(tensor.placements))):  # tp, the last one, came first
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


class Stored:
    """A tensor in a file of safetensors, of which only what is asked for is read."""

    def __init__(self, slices: Any) -> None:
        self._slices, self.shape = slices, tuple(slices.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Some of its values."""
        values: torch.Tensor = self._slices[index]
        return values


def assemble(part: Part, pieces: Iterable[tuple[Part, Stored]]) -> torch.Tensor:
    """A part of a whole tensor, out of the parts that other ranks held; what several of them held is read once."""
    distinct = dict(pieces)
    _, some = next(iter(distinct.items()))
    result = torch.empty(part.sizes, dtype=some[tuple(slice(0, 0) for _ in part.sizes)].dtype)
    for piece, stored in distinct.items():
        low = [max(a, b) for a, b in zip(part.offsets, piece.offsets, strict=True)]
        ends = [[o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for box in (part, piece)]
        high = [min(a, b) for a, b in zip(*ends, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            result[_box(low, high, part.offsets)] = stored[_box(low, high, piece.offsets)]
    return result


def _box(low: list[int], high: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those that are tied once."""
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def local_state(state: State) -> State:
    """A state in which every sharded tensor is this rank's part of it; memory is shared."""
    local: State = tree_map_only(torch.Tensor, local_view, state)
    return local


def load_local_model(model: nn.Module, state: State) -> None:
    """Become what `local_state(named_tensors(model))` was, on the same mesh."""
    own = named_tensors(model)
    if own.keys() != state.keys():
        raise ValueError("the state is of another model")
    with torch.no_grad():
        for name, tensor in own.items():
            local_view(tensor).copy_(state[name])


def sharded_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> State:
    """The inverse of `local_state(optimizer.state_dict())`, for `optimizer.load_state_dict`."""
    params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
    values = {
        number: {name: _like(params[int(number)], value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": values}


def _like(param: nn.Parameter, value: Any) -> Any:
    """A value that belongs to a parameter, sharded as it is; counters stay what they are."""
    if not isinstance(value, torch.Tensor) or value.ndim != param.ndim:
        return value
    return sharded_like(value.to(param.device), param)
