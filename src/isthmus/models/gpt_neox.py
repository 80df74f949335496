"""GPT-NeoX, from transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from isthmus.models.base import CausalLM, Layout, check_tensor_split, check_transformer, seeded


@dataclass(frozen=True)
class GPTNeoX:
    """GPT-NeoX (arXiv 2204.06745): rotary positions, attention and MLP in parallel, untied head."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    vocab_size: int = 256
    sequence_length: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_transformer(self)

    def build(self, seed: int = 0) -> nn.Module:
        """The model with float32 weights drawn from `seed`."""
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # takes seconds to import

        config = GPTNeoXConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=4 * self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            attention_dropout=self.dropout,
            hidden_dropout=self.dropout,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        with seeded(seed):
            return CausalLM(GPTNeoXForCausalLM(config))

    @property
    def layout(self) -> Layout:
        """What the stages of a pipeline share out."""
        return Layout(
            "gpt_neox.layers", "gpt_neox.embed_in", "lm_head", ("gpt_neox.emb_dropout",), ("gpt_neox.final_layer_norm",)
        )

    def tensor_plan(self, num_ranks: int) -> dict[str, ParallelStyle]:
        """How its modules are split over ranks: attention by whole heads, the MLP by hidden units, the vocabulary."""
        check_tensor_split(self.num_heads, num_ranks)
        layer = "network.gpt_neox.layers.*"
        return {
            "network.gpt_neox.embed_in": RowwiseParallel(input_layouts=Replicate()),
            f"{layer}.attention.query_key_value": ColwiseParallel(),  # rows are [num_heads, 3, head_dim]
            f"{layer}.attention.dense": RowwiseParallel(),
            f"{layer}.mlp.dense_h_to_4h": ColwiseParallel(),
            f"{layer}.mlp.dense_4h_to_h": RowwiseParallel(),
            "network.lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
