"""GPT-Neo's attention by torch's fused kernels, for which transformers has no switch."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoPreTrainedModel, GPTNeoSelfAttention
from typing_extensions import override


class FusedAttention(GPTNeoSelfAttention):
    """The attention of transformers, with its parameters and without the scores of all pairs of tokens in memory."""

    @override
    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        sees_all = self.attention_type == "global" or num_keys <= self.config.window_size
        is_causal = sees_all and attention_mask is None and num_queries == num_keys
        mask = None
        if not is_causal:
            mask = self.bias[:, :, num_keys - num_queries : num_keys, :num_keys]  # the window's
            mask = mask if attention_mask is None else mask & attention_mask
        dropout = self.attn_dropout.p if self.training else 0.0
        output = scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=1.0)
        return output, None


def fuse_attention(network: nn.Module) -> None:
    """Have a GPT-Neo of transformers attend by fused kernels, in place; parameters and their names stay."""
    assert isinstance(network, GPTNeoPreTrainedModel)
    network.config._attn_implementation = "sdpa"  # masks are then booleans, and none where it is causal
    for module in network.modules():
        if type(module) is GPTNeoSelfAttention:
            module.__class__ = FusedAttention
