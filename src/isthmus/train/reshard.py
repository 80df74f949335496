"""A checkpoint that a worker's ranks wrote on one mesh, read by its ranks on another."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isthmus.core import State, UserError
from isthmus.outer import with_present_names
from isthmus.parallel import ParallelDims
from isthmus.parallel.state import StoredTensor, TensorSlice, assemble_slice, named_tensors
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.method import Method

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankParts:
    """The parts that a rank has of its worker's tensors, and in which order the lists of its state have them."""

    parts: dict[str, TensorSlice]  # by the names of parameters and buffers
    optimizer: list[str]  # names of parameters, in the order of the inner optimizer
    fragments: list[list[str]]  # names of parameters

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, fragments: list[list[str]]) -> RankParts:
        """Return this rank's; `fragments` are the names of each fragment's parameters."""
        parts = {name: TensorSlice.of(tensor) for name, tensor in named_tensors(model).items()}
        names = {param: name for name, param in model.named_parameters()}
        order = [names[param] for group in optimizer.param_groups for param in group["params"]]
        return cls(parts, order, fragments)

    @property
    def outer_optimizer(self) -> list[str]:
        """The names of parameters in the order of the outer optimizer."""
        return [name for names in self.fragments for name in names]

    @classmethod
    def from_state_dict(cls, state: State) -> RankParts:
        """Return what `dataclasses.asdict` has made plain values of."""
        return cls(**state | {"parts": {name: TensorSlice(**part) for name, part in state["parts"].items()}})


def load_resharded(
    checkpoints: Checkpoints, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, method: Method
) -> State:
    """Return what this process saved after `step`; if the mesh was another one, what it would have saved on this one.

    There are no `generators` then, for the ranks that drew those numbers are gone. The checkpoint is undamaged on all
    ranks of this worker; model, inner optimizer and method are as they were built. A mesh that cut the model into
    other fragments is refused.
    """
    there = checkpoints.mesh_of(step)
    if there.division == checkpoints.mesh.division:
        return checkpoints.load(step)
    fragments, outer_optimizer = method.param_names, method.state_dict()["outer_optimizer"]
    check_fragments(len(fragments), there, checkpoints.mesh)
    moved = Resharding(checkpoints.load_ranks(step), RankParts.of(model, optimizer, fragments))
    state = moved.state(checkpoints.rank, optimizer.state_dict(), outer_optimizer)
    if checkpoints.worker == checkpoints.rank == 0:
        anew = ", ".join(["random numbers", *(f"compressor memory {path!r}" for path in sorted(moved.forgotten))])
        _LOGGER.info("resuming a checkpoint of %s on %s; begin anew: %s", there, checkpoints.mesh, anew)
    return state


def check_fragments(num_fragments: int, there: ParallelDims, here: ParallelDims) -> None:
    """Refuse to move a run between meshes that cut the model into different fragments; alike on all ranks."""
    if num_fragments > 1 and (there.pp, there.stages_per_rank) != (here.pp, here.stages_per_rank):
        raise UserError(
            f"mesh: pipeline stages make fragments of their own, and this run has {num_fragments}: "
            f"resume with mesh.pp {there.pp} and mesh.stages_per_rank {there.stages_per_rank}"
        )


class Resharding:
    """Takes what one rank needs out of what all ranks of a former mesh saved.

    What belongs to a parameter element by element is cut anew; what the ranks have in common is the first one's. In
    `ranks` tensors are `StoredTensor`; `own` is what this rank holds.

    Attributes:
        forgotten: paths of compressor memory that belongs to the former parts as a whole: it begins anew.
    """

    def __init__(self, ranks: list[State], own: RankParts) -> None:
        self.ranks, self.own = ranks, own
        self.there = [RankParts.from_state_dict(rank["holding"]) for rank in ranks]
        self.forgotten = set[str]()

    def state(self, rank: int, inner: State, outer: State) -> State:
        """Return what a rank of the worker would have saved on the new mesh, but for its random numbers.

        `inner` and `outer` are the states of its new optimizers.
        """
        first, models = self.ranks[0], [saved["model"] for saved in self.ranks]
        methods = [with_present_names(saved["method"]) for saved in self.ranks]
        orders = [parts.optimizer for parts in self.there]
        optimizers = [saved["inner_step"]["optimizer"] for saved in self.ranks]
        return {
            **{key: value for key, value in first.items() if key != "generators"},
            "model": {name: self._cut(name, [saved.get(name) for saved in models]) for name in self.own.parts},
            "method": self._method(methods, outer),
            "inner_step": first["inner_step"]
            | {"optimizer": self._optimizer(optimizers, orders, inner, self.own.optimizer)},
            "metrics_bytes": self.ranks[rank]["metrics_bytes"] if rank < len(self.ranks) else 0,
        }

    def _method(self, methods: list[State], outer: State) -> State:
        first, orders = methods[0], [parts.outer_optimizer for parts in self.there]
        optimizers = [saved["outer_optimizer"] for saved in methods]
        return {
            **{key: value for key, value in first.items() if key != "last_good"},  # the next evaluation is the first
            "outer_optimizer": self._optimizer(optimizers, orders, outer, self.own.outer_optimizer),
            "fragments": [
                {
                    **fragment,
                    "anchor": self._cut_all(index, [saved["fragments"][index]["anchor"] for saved in methods]),
                    "state": self._memory(index, [saved["fragments"][index]["state"] for saved in methods]),
                }
                for index, fragment in enumerate(first["fragments"])
            ],
            "in_flight": [
                {
                    **sync,
                    "pseudo_gradient": self._cut_all(
                        sync["fragment"], [saved["in_flight"][i]["pseudo_gradient"] for saved in methods]
                    ),
                    "buffers": [stored[...] for stored in sync.get("buffers", [])],  # no rank has only a part
                }
                for i, sync in enumerate(first["in_flight"])
            ],
        }

    def _optimizer(self, saved: list[State], orders: list[list[str]], fresh: State, names: list[str]) -> State:
        """Return the state of a torch optimizer; its groups, which may be others now, are the `fresh` one's."""
        ranks = [
            {order[number]: entries for number, entries in one["state"].items()}
            for one, order in zip(saved, orders, strict=True)
        ]
        state = {}
        for number, name in enumerate(names):
            entries = [rank.get(name, {}) for rank in ranks]
            keys = {key for one in entries for key in one}
            if keys:
                state[number] = {key: self._cut(name, [one.get(key) for one in entries]) for key in sorted(keys)}
        return {**fresh, "state": state}

    def _memory(self, index: int, memories: list[State], of_fragment: bool = True, path: str = "") -> State:
        """Return a compressor's memory of a fragment, as far as it can move; `path` is where this part of it lies.

        With `of_fragment` this compressor works on the fragment's own tensors, in their order.
        """
        result: State = {}
        for key in sorted({key for memory in memories for key in memory}):
            values = [memory.get(key) for memory in memories]
            value = next((value for value in values if value is not None), None)
            if isinstance(value, dict):
                parts = [value or {} for value in values]
                result[key] = self._memory(index, parts, of_fragment and key == "compressor", f"{path}{key}.")
            elif not any(map(_holds_tensors, values)):
                result[key] = value
            elif of_fragment and all(map(self._is_elementwise, [index] * len(values), self.there, values)):
                result[key] = self._cut_all(index, values)
            else:
                self.forgotten.add(path + key)
        return result

    def _is_elementwise(self, index: int, there: RankParts, value: Any) -> bool:
        sizes = [there.parts[name].sizes for name in there.fragments[index]]
        return isinstance(value, list) and [getattr(stored, "shape", None) for stored in value] == sizes

    def _cut_all(self, index: int, lists: list[Any]) -> list[torch.Tensor]:
        """Return a tensor for every parameter that this rank has of a fragment."""
        orders = [parts.fragments[index] for parts in self.there]
        ranks = [dict(zip(order, tensors, strict=True)) for order, tensors in zip(orders, lists, strict=True)]
        return [self._cut(name, [rank.get(name) for rank in ranks]) for name in self.own.fragments[index]]

    def _cut(self, name: str, values: list[Any]) -> Any:
        """Return this rank's part of what belongs to a parameter; the ranks that hold none of it have None."""
        held = [(there, value) for there, value in zip(self.there, values, strict=True) if value is not None]
        if not held or not isinstance(held[0][1], StoredTensor):
            return held[0][1] if held else None
        pieces = [(there.parts[name], stored) for there, stored in held]
        part, first = pieces[0]
        if first.shape != part.sizes:  # a counter, the same on all ranks
            return first[()]
        return assemble_slice(self.own.parts[name], pieces)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, StoredTensor) or (isinstance(value, list | tuple) and any(map(_holds_tensors, value)))


def whole_model(ranks: list[State], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the whole model that the ranks of a worker saved, with the anchors in its parameters if there are any.

    In `ranks` tensors are `StoredTensor`; `names` has those of parameters and buffers, tied ones once.
    """
    pieces = defaultdict[str, list[tuple[TensorSlice, StoredTensor]]](list)
    for rank in ranks:
        there, values = RankParts.from_state_dict(rank["holding"]), dict(rank["model"])
        for held, fragment in zip(there.fragments, rank["method"].get("fragments", []), strict=True):
            values |= dict(zip(held, fragment["anchor"], strict=True))
        for name, stored in values.items():
            pieces[name].append((there.parts[name], stored))
    return {name: assemble_slice(TensorSlice.whole(pieces[name][0][0].shape), pieces[name]) for name in names}
