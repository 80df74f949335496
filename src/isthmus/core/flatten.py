"""Nested state as a skeleton of plain JSON and a list of tensors, and back: for checkpoints and state transfers."""

from collections.abc import Sequence
from typing import Any

import torch

from isthmus.core.types import State, Tensors

_MARK = "$"  # key of a tensor's number, a tuple, or a dict that JSON has no word for
_MAX_DEPTH = 64


def flatten(state: State) -> tuple[Any, Tensors]:
    """Split a state into what JSON can say and its tensors.

    Dicts are walked in the order of their keys, not of their insertion, so that equal states give equal results.

    Args:
        state: dicts (keys: strings and integers), lists, tuples, tensors, numbers, strings, bools and None.

    Returns:
        The skeleton, plain JSON with a number for every tensor, and the tensors in the order of these numbers.

    Raises:
        TypeError: something in it is neither a tensor nor plain; the message says where.
    """
    tensors: Tensors = []
    return _flatten(state, "state", tensors), tensors


def unflatten(skeleton: Any, tensors: Sequence[Any]) -> State:
    """Undo `flatten`; the skeleton may come from anybody.

    Raises:
        ValueError: it is malformed, or does not hold each of the tensors exactly once.
    """
    left = dict(enumerate(tensors))
    state = _unflatten(skeleton, left, _MAX_DEPTH)
    if not isinstance(state, dict):
        raise ValueError("a state must be a dict")
    if left:
        raise ValueError(f"{len(left)} tensors are not in the skeleton of the state")
    return state


def _flatten(value: Any, path: str, tensors: Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_MARK: "tensor", "number": len(tensors) - 1}
    if isinstance(value, dict):
        return _flatten_dict(value, path, tensors)
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot write down {path}: {type(value).__name__} is neither a tensor nor plain")


def _flatten_dict(value: dict[Any, Any], path: str, tensors: Tensors) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"cannot write down {path}[{key!r}]: keys must be strings or integers")
    keys = sorted(value, key=lambda key: (isinstance(key, str), key))
    items = [[key, _flatten(value[key], f"{path}[{key!r}]", tensors)] for key in keys]
    if _MARK in value or any(isinstance(key, int) for key in keys):
        return {_MARK: "dict", "items": items}
    return dict(items)


def _unflatten(value: Any, left: dict[int, Any], depth: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError(f"a state is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_unflatten(item, left, depth - 1) for item in value]
    if _MARK not in value:
        return {key: _unflatten(item, left, depth - 1) for key, item in value.items()}
    match value:
        case {"$": "tensor", "number": int(number)} if len(value) == 2 and number in left:
            return left.pop(number)
        case {"$": "tuple", "items": list(items)} if len(value) == 2:
            return tuple(_unflatten(item, left, depth - 1) for item in items)
        case {"$": "dict", "items": list(items)} if len(value) == 2 and all(_is_item(item) for item in items):
            return {key: _unflatten(item, left, depth - 1) for key, item in items}
    raise ValueError("a state marks something as a tensor, a tuple or a dict that is none of them")


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)
