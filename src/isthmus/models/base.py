"""The contract of every model: a module that maps a batch to the mean of its losses.

A module may also have

- `measure(batches) -> {name: (total, count)}`: figures beside the loss (accuracy, word error rate),
  over batches on its device, in evaluation mode; the value is total / count, both summed over those who share the work;
- `buffer_rules`: what happens to its buffers when workers sync (`isthmus.core.buffer_rules`);
- `after_sync(num_steps)`: called with the anchors in its parameters after every round (num_steps inner steps), to
  compute what all workers compute alike, such as moving averages of the anchors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from isthmus.core import Registry, UserError
from isthmus.core.imports import check_allowed, import_path
from isthmus.models.causal_lm import CausalLM

MODELS = Registry(
    "model",
    {
        "gpt_neox": "isthmus.models.gpt_neox:GPTNeoX",
        "gpt_neo": "isthmus.models.gpt_neo:GPTNeo",
        "wav2vec2": "isthmus.models.wav2vec2:Wav2Vec2",
        "wav2vec2_ctc": "isthmus.models.wav2vec2_ctc:Wav2Vec2CTC",
        "biggan": "isthmus.models.biggan:BigGAN",
        "huggingface": "isthmus.models.huggingface:HuggingFace",
        "resnet": "isthmus.models.resnet:ResNet",
        "module": "isthmus.models.base:Module",
    },
)


class ModelSpec(Protocol):
    """A model's description: a frozen dataclass whose fields are its options.

    Data look for the options that they need: text for `sequence_length` and `vocab_size`, for example. Where building
    it imports what takes seconds, `libraries` names these modules: `isthmus launch` imports them once for all workers.
    """

    def build(self, seed: int = 0) -> nn.Module:
        """Make the module `batch -> scalar loss`, float32 on the CPU; equal seeds give equal weights."""
        ...


def outline(spec: ModelSpec) -> nn.Module:
    """Make a model's parameters on the meta device: names and shapes, without values or a forward pass.

    Specs of models whose library takes seconds to import have an `outline` of their own; others are built.
    """
    with torch.device("meta"):
        module: nn.Module = spec.outline() if hasattr(spec, "outline") else spec.build()
    return module


def embedding_outline(num_embeddings: int, size: int) -> nn.Embedding:
    """Make an embedding for an outline without drawing values, for which torch would import its compiler."""
    make: Any = nn.Embedding.from_pretrained
    embedding: nn.Embedding = make(torch.empty(num_embeddings, size), freeze=False)
    return embedding


@dataclass(frozen=True)
class ModuleNames:
    """The names of the submodules that the stages of a pipeline share out, in a network of transformers."""

    blocks: str  # the nn.ModuleList
    embedding: str  # of the tokens, on the first stage
    head: str  # on the last stage; may be tied to the embedding
    before: tuple[str, ...] = ()  # others before the blocks, on the first stage
    after: tuple[str, ...] = ()  # those between the blocks and the head, on the last stage


@dataclass(frozen=True)
class Transformer(ABC):
    """The options that all of our causal language models have."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    vocab_size: int = 256
    sequence_length: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fractions(self, "dropout")
        check_at_least(1, self, *(name for name in asdict(self) if name != "dropout"))
        if self.hidden_size % (2 * self.num_heads):
            raise UserError(
                f"model.hidden_size is {self.hidden_size}, which does not split into {self.num_heads} heads of even "
                f"size; choose a multiple of {2 * self.num_heads}"
            )

    @abstractmethod
    def network(self) -> nn.Module:
        """Make the network of transformers."""

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with float32 weights drawn from `seed`."""
        with seeded(seed):
            return CausalLM(self.network())

    def shared_options(self) -> dict[str, Any]:
        """Return what the configurations of transformers call by the same names."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.sequence_length,
            "attention_dropout": self.dropout,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


@dataclass(frozen=True)
class Module:
    """Any `nn.Module` by its import path, built with `arguments`; its forward maps a batch to its mean loss."""

    path: str  # "package.module:Class"
    arguments: dict[str, Any] = field(default_factory=dict)
    sequence_length: int = 128

    def build(self, seed: int = 0) -> nn.Module:
        """Make the module, with its random numbers drawn from `seed`."""
        check_allowed(self.path, "model.path")
        try:
            make: Callable[..., nn.Module] = import_path(self.path)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f'model.path: {self.path!r} cannot be imported as "package.module:Class": {error}'
            ) from error
        with seeded(seed):
            try:
                return make(**self.arguments)
            except TypeError as error:
                raise UserError(f"model.arguments: {self.path!r} does not take them: {error}") from error


def check_at_least(least: int, spec: object, *names: str) -> None:
    """Refuse options of a model, by name, that are smaller."""
    for name in names:
        if getattr(spec, name) < least:
            raise UserError(f"model.{name} is {getattr(spec, name)}; choose at least {least}")


def check_fractions(spec: object, *names: str) -> None:
    """Refuse options of a model, by name, that are below 0, or 1 and above."""
    for name in names:
        if not 0 <= getattr(spec, name) < 1:
            raise UserError(f"model.{name} is {getattr(spec, name)}; choose at least 0 and below 1")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers on the CPU from `seed` within the context, then let the generator go on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def check_tensor_split(num_heads: int, num_ranks: int) -> None:
    """Refuse to split an attention head over several ranks of tensor parallelism."""
    if num_heads % num_ranks:
        raise UserError(
            f"mesh.tp is {num_ranks}, which does not divide the model's {num_heads} heads; choose a divisor"
        )
