"""GPT-NeoX, from transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from isthmus.models.base import CausalLM, check_transformer, seeded


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
