"""GPT-Neo, from transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from isthmus.models.base import CausalLM, Layout, check_tensor_split, check_transformer, embedding_outline, seeded

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class GPTNeo:
    """GPT-Neo (EleutherAI 2021): global and local attention in turn, learned positions, tied head."""

    libraries: ClassVar = ("transformers.models.gpt_neo.modeling_gpt_neo",)

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    window_size: int = 256  # tokens that local attention sees
    vocab_size: int = 256
    sequence_length: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_transformer(self, "window_size")

    def build(self, seed: int = 0) -> nn.Module:
        """The model with float32 weights drawn from `seed`."""
        from transformers import GPTNeoConfig, GPTNeoForCausalLM  # takes seconds to import

        pairs, odd = divmod(self.num_layers, 2)
        config = GPTNeoConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            intermediate_size=4 * self.hidden_size,
            attention_types=[[["global", "local"], pairs], [["global"], odd]],
            window_size=self.window_size,
            activation_function="gelu_pytorch_tanh",  # equals gelu_new, in one kernel
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            attention_dropout=self.dropout,
            embed_dropout=self.dropout,
            resid_dropout=self.dropout,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        with seeded(seed):
            return CausalLM(GPTNeoForCausalLM(config))

    def outline(self) -> nn.Module:
        """The model's parameters without transformers, which takes seconds to import."""
        size, inner_size = self.hidden_size, 4 * self.hidden_size

        def block() -> nn.Module:
            attention = {f"{name}_proj": nn.Linear(size, size, bias=name == "out") for name in ("k", "v", "q", "out")}
            mlp = {"c_fc": nn.Linear(size, inner_size), "c_proj": nn.Linear(inner_size, size)}
            return nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(size),
                    "attn": nn.ModuleDict({"attention": nn.ModuleDict(attention)}),
                    "ln_2": nn.LayerNorm(size),
                    "mlp": nn.ModuleDict(mlp),
                }
            )

        sizes = {"wte": self.vocab_size, "wpe": self.sequence_length}
        embeddings = {name: embedding_outline(number, size) for name, number in sizes.items()}
        blocks = nn.ModuleList(block() for _ in range(self.num_layers))
        head = nn.Linear(size, self.vocab_size, bias=False)
        head.weight = embeddings["wte"].weight
        transformer = nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(size)})
        return nn.ModuleDict({"network": nn.ModuleDict({"transformer": transformer, "lm_head": head})})

    @property
    def layout(self) -> Layout:
        """What the stages of a pipeline share out."""
        before = ("transformer.wpe", "transformer.drop")
        return Layout("transformer.h", "transformer.wte", "lm_head", before, ("transformer.ln_f",))

    def tensor_plan(self, num_ranks: int) -> dict[str, ParallelStyle]:
        """How its modules are split over ranks: attention by whole heads, the MLP by hidden units, the vocabulary."""
        from torch.distributed.tensor import Replicate  # takes a second to import
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from isthmus.models.own_heads import OwnHeads

        check_tensor_split(self.num_heads, num_ranks)
        layer = "network.transformer.h.*"
        return {
            "network.transformer.wte": RowwiseParallel(input_layouts=Replicate()),
            f"{layer}.attn.attention": OwnHeads(),
            f"{layer}.attn.attention.[qkv]_proj": ColwiseParallel(),
            f"{layer}.attn.attention.out_proj": RowwiseParallel(),
            f"{layer}.mlp.c_fc": ColwiseParallel(),
            f"{layer}.mlp.c_proj": RowwiseParallel(),
            "network.lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
