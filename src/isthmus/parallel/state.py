"""What a rank saves of sharded weights and of their optimizer: its own part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from isthmus.core.fragment import local_view, sharded_like
from isthmus.core.types import State


def local_state(state: State) -> State:
    """A state in which every sharded tensor is this rank's part of it; memory is shared."""
    local: State = tree_map_only(torch.Tensor, local_view, state)
    return local


def load_local_model(model: nn.Module, state: State) -> None:
    """Become what `local_state(model.state_dict())` was, on the same mesh."""
    own = model.state_dict()
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
