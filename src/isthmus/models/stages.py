"""Splitting a causal language model by its layers into the stages of a pipeline."""

import copy
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from isthmus.core.types import UserError
from isthmus.models.base import ModelSpec, ModuleNames
from isthmus.models.cross_entropy import next_token_loss
from isthmus.parallel.pipeline import LocalStages


class NumberedBlocks(nn.ModuleList):
    """Some of a model's blocks, named by the numbers that they have in the whole model."""

    def __init__(self, numbered: dict[int, nn.Module]) -> None:
        super().__init__()
        for number, block in numbered.items():
            self.add_module(str(number), block)


class StageModule(nn.Module):
    """Some layers of a causal language model, the first of them with the embedding, the last with the head."""

    def __init__(self, network: nn.Module, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.network = network
        self.is_first, self.is_last = is_first, is_last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden states [batch, seq, hidden], or logits [batch, seq, vocab] of the last stage.

        Inputs are such hidden states, or for the first stage tokens [batch, seq + 1] int64, the last a target only.
        """
        given = {"input_ids": inputs[:, :-1]} if self.is_first else {"inputs_embeds": inputs}
        output: torch.Tensor = self.network(**given).logits
        return output if self.is_last else output.clone()  # of a view, which FSDP2 warns of as a module's output


def check_stages(spec: ModelSpec, model: nn.Module, num_stages: int) -> ModuleNames:
    """Return the names by which a model, or its outline, is split into so many stages.

    Raises:
        UserError: the model has fewer layers than stages, or is of a type that cannot be split.
    """
    names: ModuleNames | None = getattr(spec, "module_names", None)
    if names is None:
        raise UserError(f"mesh.pp: a model of type {type(spec).__name__} cannot be cut into stages; set it to 1")
    num_layers = len(_blocks(model.get_submodule("network"), names))
    if num_stages > num_layers:
        raise UserError(
            f"mesh: {num_stages} pipeline stages are too many for a model of {num_layers} layers; lower mesh.pp"
        )
    return names


def split_into_stages(
    spec: ModelSpec, model: nn.Module, rank: int, num_ranks: int, stages_per_rank: int = 1
) -> LocalStages:
    """Reduce `model`, in place, to the layers that one rank of a pipeline trains, and make that rank's stages.

    Stage s belongs to rank s % num_ranks. `model` keeps the names that its parameters have in the whole model; over
    all ranks each stands exactly once. The stages are separate modules around the model's own blocks, embedding and
    head: what shards a stage's parameters shards the model's, and what is loaded into the model the stages compute
    with. A head that is tied to the embedding is a parameter of the first rank alone, and lent to the last.

    Raises:
        UserError: the model has fewer layers than stages, or is of a type that cannot be split.
    """
    num_stages = num_ranks * stages_per_rank
    names = check_stages(spec, model, num_stages)
    network: Any = model.network
    blocks = dict(enumerate(_blocks(network, names)))
    spans = [span.tolist() for span in np.array_split(range(len(blocks)), num_stages)]  # the first ones are longer
    own, last = range(rank, num_stages, num_ranks), num_stages - 1
    stages = {s: _stage(network, names, spans[s], s == 0, s == last) for s in own}

    embedding: Any = network.get_submodule(names.embedding)
    head: Any = network.get_submodule(names.head)
    ends = {0: embedding, last: head} if embedding.weight is head.weight else {}
    network.set_submodule(names.blocks, NumberedBlocks({i: blocks[i] for s in own for i in spans[s]}))
    _leave_out(network, _absent(names, 0 in own, last in own))
    if last in own and ends:
        _leave_out(network, [names.head])
    return LocalStages(stages, num_stages, next_token_loss, next((ends[s] for s in own if s in ends), None))


def _stage(network: nn.Module, names: ModuleNames, numbers: list[int], is_first: bool, is_last: bool) -> StageModule:
    """Copy the skeleton of the network around the same submodules, with only some of its blocks."""
    skeleton = {network.get_submodule(name) for name in ["", *accumulate(names.blocks.split("."), "{}.{}".format)]}
    shared = {id(part): part for part in network.modules() if part not in skeleton}
    twin = copy.deepcopy(network, shared)  # what stands in the memo is not copied
    blocks = _blocks(network, names)
    twin.set_submodule(names.blocks, NumberedBlocks({number: blocks[number] for number in numbers}))
    _leave_out(twin, _absent(names, is_first, is_last))
    return StageModule(twin, is_first, is_last)


def _blocks(network: nn.Module, names: ModuleNames) -> nn.ModuleList:
    """Return the network's list of blocks."""
    blocks = network.get_submodule(names.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _absent(names: ModuleNames, has_first: bool, has_last: bool) -> list[str]:
    """Return the names of the submodules that belong to other stages."""
    first, last = [names.embedding, *names.before], [*names.after, names.head]
    return first * (not has_first) + last * (not has_last)


def _leave_out(network: nn.Module, names: list[str]) -> None:
    """Put a function in the place of these submodules, which is no module: nothing will shard or name it."""
    for name in names:
        parent, _, child = name.rpartition(".")
        delattr(network.get_submodule(parent), child)
        setattr(network.get_submodule(parent), child, _elsewhere)


def _elsewhere(inputs: torch.Tensor) -> torch.Tensor:
    """Stand for a submodule of another stage: pass hidden states on, turn position numbers into 0."""
    return inputs if inputs.is_floating_point() else torch.zeros((), device=inputs.device)
