"""A model cut into fragments: the parts that are synced together."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
from torch import nn

from isthmus.core.types import State, Tensors, UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BufferRule = Literal["averaged", "replicated", "local"]
_log = logging.getLogger(__name__)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_STATISTICS: dict[str, BufferRule] = {"running_mean": "averaged", "running_var": "averaged"}


def is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Return whether FSDP2 or tensor parallelism has sharded a tensor, without importing DTensor (a second)."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))  # where another thread imports it just now there is none


def local_view(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a parameter, sharing its memory (FSDP2 and TP shard as DTensor)."""
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor


def sharded_like(own: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The inverse of `local_view`: the tensor of which this rank has `own`, sharded as `param` is, if it is."""
    if not is_dtensor(param):
        return own
    from torch.distributed.tensor import DTensor

    shape, stride = param.shape, param.stride()
    return DTensor.from_local(own, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)


@dataclass
class Fragment:
    """A part of the model that is synced as one, with everything the method remembers about it."""

    name: str
    params: Tensors  # local shards, views into the model
    anchor: list[nn.Parameter]  # float32 values at the last outer step
    param_names: list[str]  # in the same order
    state: State = field(default_factory=dict)  # compressor memory, private to this worker
    version: int = 0  # committed outer steps of this fragment
    num_steps: int = 0  # this worker's inner steps since its last capture, and those of refused syncs
    averaged: Tensors = field(default_factory=list)  # live buffers that become their mean with every sync
    replicated: Tensors = field(default_factory=list)  # live buffers that are equal on all workers by themselves

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device if self.params else torch.device("cpu")

    @property
    def shared_buffers(self) -> Tensors:
        """The buffers that are equal on all workers once a sync is finished."""
        return [*self.averaged, *self.replicated]

    @classmethod
    def of(cls, name: str, params: dict[str, nn.Parameter]) -> Fragment:
        """Make a fragment of these parameters, anchored at their present values."""
        views = [local_view(param) for param in params.values()]
        return cls(name, views, [nn.Parameter(view.to(torch.float32, copy=True)) for view in views], list(params))


def split_whole(model: nn.Module, num_fragments: int = 1) -> list[Fragment]:
    """The whole model as one fragment."""
    if num_fragments != 1:
        raise UserError(
            f"outer.split is whole, which makes 1 fragment, not {num_fragments}: set it to strided or balanced"
        )
    return _with_buffers(model, [Fragment.of("all", _trainable(model))])


def split_strided(model: nn.Module, num_fragments: int) -> list[Fragment]:
    """Every P-th block of the model's block list to one fragment (arXiv 2501.18512, section 2.1, strided pattern).

    What lies outside the block list (embeddings, head, last norm) goes, parameter by parameter in model order, to the
    fragment that is smallest so far. A model without so many blocks is split as `split_balanced` does.
    """
    name, blocks = block_list(model)
    if len(blocks) < num_fragments:
        _log.info(
            "the model has no list of at least %d blocks (nn.ModuleList): it is split into %d fragments of equal size",
            *(num_fragments, num_fragments),
        )
        return split_balanced(model, num_fragments)
    order = {number: index for index, (number, _) in enumerate(blocks.named_children())}  # a stage has only some
    owner = {}
    for key in _trainable(model):
        if key.startswith(f"{name}."):
            owner[key] = order[key[len(name) + 1 :].split(".", 1)[0]] % num_fragments
    return _assemble(model, owner, num_fragments)


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the model's longest `nn.ModuleList` and its name; an empty one where the model has none."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))


def split_balanced(model: nn.Module, num_fragments: int) -> list[Fragment]:
    """Tensors packed, largest first, into fragments of nearly equal size (arXiv 2604.21428)."""
    params = _trainable(model)
    if len(params) < num_fragments:
        raise UserError(
            f"the model has {len(params)} trainable tensors, too few for {num_fragments} fragments: "
            f"set outer.schedule.num_fragments to {len(params)} or less"
        )
    return _assemble(model, {}, num_fragments, order=sorted(params, key=lambda key: -params[key].numel()))


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _assemble(
    model: nn.Module, owner: dict[str, int], num_fragments: int, order: list[str] | None = None
) -> list[Fragment]:
    """Give every parameter without an owner to the smallest fragment, then build fragments in model order."""
    params = _trainable(model)
    sizes = [0] * num_fragments
    for key, index in owner.items():
        sizes[index] += params[key].numel()
    for key in order or list(params):
        if key not in owner:
            owner[key] = sizes.index(min(sizes))
            sizes[owner[key]] += params[key].numel()
    fragments = [
        Fragment.of(str(index), {key: param for key, param in params.items() if owner[key] == index})
        for index in range(num_fragments)
    ]
    return _with_buffers(model, fragments)


def buffer_rules(model: nn.Module) -> dict[str, BufferRule]:
    """Return what happens to every buffer of a model when workers sync.

    A module says it by an attribute `buffer_rules`, {name: rule}. "averaged": the mean over the workers, after every
    sync, which the running statistics of batch norm are unless they say otherwise; "replicated": what all workers
    compute alike, and a worker that joins is handed; "local", the default: each worker's own.
    """
    rules: dict[str, BufferRule] = {}
    for prefix, module in model.named_modules():
        known = _STATISTICS if isinstance(module, _BATCH_NORMS + _INSTANCE_NORMS) else {}
        known = known | getattr(module, "buffer_rules", {})
        for name, _ in module.named_buffers(recurse=False):
            rules[f"{prefix}.{name}" if prefix else name] = known.get(name, "local")
    return rules


def _with_buffers(model: nn.Module, fragments: list[Fragment]) -> list[Fragment]:
    """Give the buffers that workers share to the last fragment: they are synced once a round."""
    buffers, last = dict(model.named_buffers()), fragments[-1]
    for name, rule in buffer_rules(model).items():
        if name in buffers and rule != "local":
            (last.averaged if rule == "averaged" else last.replicated).append(buffers[name])
    return fragments
