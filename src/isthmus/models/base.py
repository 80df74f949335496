"""The contract of every model: a module that maps a batch to the mean of its losses.

A module may also have

- `measure(batches) -> {name: (total, count)}`: what is worth knowing of it beside its loss (accuracy, word error rate),
  over batches on its device, in evaluation mode; the value is total / count, both summed over those who share the work;
- `buffer_rules`: what becomes of its buffers when workers sync (`isthmus.core.buffer_rules`);
- `after_sync(num_steps)`: called with the anchors in its parameters after every round (num_steps inner steps), to
  compute what all workers compute alike, such as moving averages of the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from isthmus.core.types import UserError
from isthmus.inner.step import Batch


class ModelSpec(Protocol):
    """A model's description: a frozen dataclass whose fields are its options.

    Data look for the options that they need: text for `sequence_length` and `vocab_size`, for example. Where building
    it imports what takes seconds, `libraries` names these modules: `isthmus launch` imports them once for all workers.
    """

    def build(self, seed: int = 0) -> nn.Module:
        """The module `batch -> scalar loss`; equal seeds give equal weights. Weights are float32, on the CPU."""
        ...


def outline(spec: ModelSpec) -> nn.Module:
    """A model's parameters, by name and shape alone: on the meta device, without values, and without a forward pass.

    Specs of models whose library takes seconds to import have an `outline` of their own; others are built.
    """
    with torch.device("meta"):
        module: nn.Module = spec.outline() if hasattr(spec, "outline") else spec.build()
    return module


def embedding_outline(num_embeddings: int, size: int) -> nn.Embedding:
    """An embedding for an outline: to draw its values even on the meta device torch would import its compiler."""
    return nn.Embedding.from_pretrained(torch.empty(num_embeddings, size), freeze=False)


@dataclass(frozen=True)
class Layout:
    """Where a network of transformers keeps what its stages share out: names of its submodules."""

    blocks: str  # the nn.ModuleList
    embedding: str  # of the tokens, on the first stage
    head: str  # on the last stage; may be tied to the embedding
    before: tuple[str, ...] = ()  # what else stands before the blocks, on the first stage
    after: tuple[str, ...] = ()  # what stands between the blocks and the head, on the last stage


class CausalLM(nn.Module):
    """A network from tokens to logits, trained to predict the next token.

    Blocks stay where the network has them: inside its `nn.ModuleList`, by which fragments and Muon find them.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network  # of transformers: (input_ids) -> output with .logits [batch, seq, vocab]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy, in nats a token, of {"tokens": [batch, seq + 1] int64}."""
        tokens = batch["tokens"]
        return next_token_loss(self.network(input_ids=tokens[:, :-1]).logits, tokens)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats a token, of logits [batch, seq, vocab] for tokens [batch, seq + 1] int64."""
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Module:
    """Any `nn.Module` by its import path, built with `arguments`; its forward maps a batch to its mean loss."""

    path: str  # "package.module:Class"
    arguments: dict[str, Any] = field(default_factory=dict)
    sequence_length: int = 128

    def build(self, seed: int = 0) -> nn.Module:
        """The module, its own initialisation seeded."""
        module, _, name = self.path.partition(":")
        try:
            make: Callable[..., nn.Module] = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f'model: {self.path!r} cannot be imported as "package.module:Class": {error}') from error
        with seeded(seed):
            try:
                return make(**self.arguments)
            except TypeError as error:
                raise UserError(f"model: {self.path!r} does not take these arguments: {error}") from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers on the CPU from `seed`, then let the generator go on as if nothing had happened."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def check_transformer(spec: Any, *sizes: str) -> None:
    """Refuse sizes below 1, heads that do not divide the hidden size, and a dropout that is no probability."""
    for name in ("hidden_size", "num_layers", "num_heads", "vocab_size", "sequence_length", *sizes):
        if getattr(spec, name) < 1:
            raise UserError(f"model: {name} is {getattr(spec, name)}; choose at least 1")
    if spec.hidden_size % (2 * spec.num_heads):
        raise UserError(
            f"model: hidden_size {spec.hidden_size} does not split into {spec.num_heads} heads of even size; "
            f"choose a multiple of {2 * spec.num_heads}"
        )
    if not 0 <= spec.dropout < 1:
        raise UserError(f"model: dropout is {spec.dropout}; choose at least 0 and below 1")


def check_tensor_split(num_heads: int, num_ranks: int) -> None:
    """Refuse to split attention heads: ranks of tensor parallelism have whole ones."""
    if num_heads % num_ranks:
        raise UserError(f"mesh: tp {num_ranks} does not divide the model's {num_heads} heads; choose a divisor")
