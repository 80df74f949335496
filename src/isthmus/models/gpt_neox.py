"""GPT-NeoX, by the classes of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from typing_extensions import override

from isthmus.models.base import ModuleNames, Transformer, check_tensor_split, embedding_outline

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class GPTNeoX(Transformer):
    """GPT-NeoX (arXiv 2204.06745): rotary positions, attention and MLP in parallel, untied head."""

    libraries: ClassVar = ("transformers.models.gpt_neox.modeling_gpt_neox",)

    @override
    def network(self) -> nn.Module:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # takes seconds to import

        config = GPTNeoXConfig(
            **self.shared_options(),
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            hidden_dropout=self.dropout,
        )
        return GPTNeoXForCausalLM(config)

    def outline(self) -> nn.Module:
        """Make the model's parameters without transformers, which takes seconds to import."""
        size, inner_size = self.hidden_size, 4 * self.hidden_size

        def block() -> nn.Module:
            norms = {f"{name}_layernorm": nn.LayerNorm(size) for name in ("input", "post_attention")}
            attention = {"query_key_value": nn.Linear(size, 3 * size), "dense": nn.Linear(size, size)}
            mlp = {"dense_h_to_4h": nn.Linear(size, inner_size), "dense_4h_to_h": nn.Linear(inner_size, size)}
            return nn.ModuleDict({**norms, "attention": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})

        blocks = nn.ModuleList(block() for _ in range(self.num_layers))
        embedding, norm = embedding_outline(self.vocab_size, size), nn.LayerNorm(size)
        gpt_neox = nn.ModuleDict({"embed_in": embedding, "layers": blocks, "final_layer_norm": norm})
        head = nn.Linear(size, self.vocab_size, bias=False)
        return nn.ModuleDict({"network": nn.ModuleDict({"gpt_neox": gpt_neox, "lm_head": head})})

    @property
    def module_names(self) -> ModuleNames:
        """The names of its submodules, for the stages of a pipeline."""
        return ModuleNames(
            "gpt_neox.layers", "gpt_neox.embed_in", "lm_head", ("gpt_neox.emb_dropout",), ("gpt_neox.final_layer_norm",)
        )

    def tensor_plan(self, num_ranks: int) -> dict[str, ParallelStyle]:
        """Return how its modules are split over ranks: whole heads, hidden units of the MLP, and the vocabulary."""
        from torch.distributed.tensor import Replicate  # takes a second to import
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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
