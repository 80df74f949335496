"""GPT-Neo, by the classes of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from typing_extensions import override

from isthmus.models.base import ModuleNames, Transformer, check_tensor_split, embedding_outline

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class GPTNeo(Transformer):
    """GPT-Neo (EleutherAI 2021): global and local attention in turn, learned positions, tied head."""

    libraries: ClassVar = ("transformers.models.gpt_neo.modeling_gpt_neo",)

    window_size: int = 256  # tokens that local attention sees

    @override
    def network(self) -> nn.Module:
        from transformers import GPTNeoConfig, GPTNeoForCausalLM  # takes seconds to import

        from isthmus.models.gpt_neo_attention import fuse_attention

        pairs, odd = divmod(self.num_layers, 2)
        config = GPTNeoConfig(
            **self.shared_options(),
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            attention_types=[[["global", "local"], pairs], [["global"], odd]],
            window_size=self.window_size,
            activation_function="gelu_pytorch_tanh",  # equals gelu_new, in one kernel
            embed_dropout=self.dropout,
            resid_dropout=self.dropout,
        )
        network = GPTNeoForCausalLM(config)
        fuse_attention(network)
        return network

    def outline(self) -> nn.Module:
        """Make the model's parameters without transformers, which takes seconds to import."""
        size, inner_size = self.hidden_size, 4 * self.hidden_size

        def block() -> nn.Module:
            matrices = {f"{name}_proj": nn.Linear(size, size, bias=name == "out") for name in ("k", "v", "q", "out")}
            attention = nn.ModuleDict({"attention": nn.ModuleDict(matrices)})
            mlp = nn.ModuleDict({"c_fc": nn.Linear(size, inner_size), "c_proj": nn.Linear(inner_size, size)})
            norms = (nn.LayerNorm(size), nn.LayerNorm(size))
            return nn.ModuleDict({"ln_1": norms[0], "attn": attention, "ln_2": norms[1], "mlp": mlp})

        sizes = {"wte": self.vocab_size, "wpe": self.sequence_length}
        embeddings = {name: embedding_outline(number, size) for name, number in sizes.items()}
        blocks = nn.ModuleList(block() for _ in range(self.num_layers))
        head = nn.Linear(size, self.vocab_size, bias=False)
        head.weight = embeddings["wte"].weight
        transformer = nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(size)})
        return nn.ModuleDict({"network": nn.ModuleDict({"transformer": transformer, "lm_head": head})})

    @property
    def module_names(self) -> ModuleNames:
        """The names of its submodules, for the stages of a pipeline."""
        before = ("transformer.wpe", "transformer.drop")
        return ModuleNames("transformer.h", "transformer.wte", "lm_head", before, ("transformer.ln_f",))

    def tensor_plan(self, num_ranks: int) -> dict[str, ParallelStyle]:
        """Return how its modules are split over ranks: whole heads, hidden units of the MLP, and the vocabulary."""
        from torch.distributed.tensor import Replicate  # takes a second to import
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from isthmus.models.local_heads import LocalHeads

        check_tensor_split(self.num_heads, num_ranks)
        layer = "network.transformer.h.*"
        return {
            "network.transformer.wte": RowwiseParallel(input_layouts=Replicate()),
            f"{layer}.attn.attention": LocalHeads(),
            f"{layer}.attn.attention.[qkv]_proj": ColwiseParallel(),
            f"{layer}.attn.attention.out_proj": RowwiseParallel(),
            f"{layer}.mlp.c_fc": ColwiseParallel(),
            f"{layer}.mlp.c_proj": RowwiseParallel(),
            "network.lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
