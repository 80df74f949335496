"""How the language models attend: by fused kernels, without a mask where every token sees all before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from isthmus.core.torch_internals import TorchDispatchMode, tree_leaves
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX
from isthmus.models.huggingface import HuggingFace

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 31, "sequence_length": 20}


@dataclass
class Call:
    """What one call of `scaled_dot_product_attention` was given."""

    mask: torch.Tensor | None
    is_causal: bool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls of torch's fused attention."""
    seen, attention = list[Call](), nn.functional.scaled_dot_product_attention

    def recorded(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
                 **more: Any) -> torch.Tensor:  # fmt: skip
        seen.append(Call(attn_mask, is_causal))
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr("isthmus.models.gpt_neo_attention.scaled_dot_product_attention", recorded)
    return seen


class Squares(TorchDispatchMode):
    """Notes the tensors of [..., tokens, tokens] that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-2:] == (20, 20):
                self.seen.add(str(func))
        return result


def gpt2(folder: Path) -> HuggingFace:
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=31, n_positions=20, attn_pdrop=0.0).save_pretrained(folder)
    return HuggingFace(str(folder), sequence_length=20)


def llama(folder: Path) -> HuggingFace:
    from transformers import LlamaConfig

    few_keys = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=31, **few_keys).save_pretrained(
        folder
    )
    return HuggingFace(str(folder), sequence_length=20)


def gpt_neo_of_a_folder(folder: Path) -> HuggingFace:
    GPTNeo(**SIZES).network().config.save_pretrained(folder)
    return HuggingFace(str(folder), sequence_length=20)


SPECS = {
    "gpt_neox": lambda folder: GPTNeoX(**SIZES),
    "gpt_neo": lambda folder: GPTNeo(**SIZES),
    "gpt2": gpt2,
    "llama": llama,
    "gpt_neo of a folder": gpt_neo_of_a_folder,
}


def tokens_of(length: int = 20) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(31, (2, length + 1), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_fused_causal_and_without_a_mask(
    name: str, precision: torch.dtype, calls: list[Call], tmp_path: Path
) -> None:
    """Forward and backward on the flash kernel alone, which takes no mask on a GPU; no scores of all pairs."""
    model = SPECS[name](tmp_path).build()
    squares = Squares()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), squares:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = model(tokens_of())
        loss.backward()
    assert calls == [Call(None, True)] * 2
    assert not squares.seen


@pytest.mark.parametrize("length", [4, 9, 20])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_gpt_neo_attends_as_transformers_own(length: int, num_layers: int, calls: list[Call]) -> None:
    """Windows of 4 tokens in every second layer: the window's mask is a boolean that all samples and heads share."""
    from transformers import GPTNeoForCausalLM

    spec = GPTNeo(**{**SIZES, "num_layers": num_layers}, window_size=4)
    fused, tokens = spec.build().network, tokens_of(length)["tokens"][:, :-1]
    config = type(fused.config).from_dict(fused.config.to_dict())
    own = GPTNeoForCausalLM(config)
    assert own.config._attn_implementation == "eager"
    own.load_state_dict(fused.state_dict())
    results = []
    for network in (own, fused):
        logits = network(input_ids=tokens).logits
        logits.square().mean().backward()
        results.append([logits, *(param.grad for param in network.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    masks = [None if call.mask is None else (call.mask.dtype, call.mask.shape) for call in calls]
    local = None if length <= 4 else (torch.bool, (1, 1, length, length))
    assert masks == [None, local, None][:num_layers]


def test_gpt_neo_heeds_a_mask_of_padding() -> None:
    """As whoever generates text with the network gives one."""
    from transformers import GPTNeoForCausalLM

    fused, tokens = GPTNeo(**SIZES, window_size=4).build().network, tokens_of()["tokens"][:, :-1]
    own = GPTNeoForCausalLM(type(fused.config).from_dict(fused.config.to_dict()))
    own.load_state_dict(fused.state_dict())
    padding = torch.ones_like(tokens)
    padding[0, :5] = 0
    found, expected = (network(input_ids=tokens, attention_mask=padding).logits for network in (fused, own))
    torch.testing.assert_close(found[0, 5:], expected[0, 5:], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[0, 5:], fused(input_ids=tokens).logits[0, 5:])


def test_gpt_neo_drops_as_many_scores_as_asked() -> None:
    """In training only."""
    spec = replace(GPTNeo(**SIZES), dropout=0.5)
    model = spec.build()
    assert model(tokens_of()) != model(tokens_of())
    model.eval()
    assert model(tokens_of()) == model(tokens_of())
