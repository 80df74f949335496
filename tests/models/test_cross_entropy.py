"""The loss in chunks against torch's own over all logits, and what it keeps in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isthmus.core.torch_internals import TorchDispatchMode, tree_leaves
from isthmus.inner import SupervisedStep
from isthmus.models import CausalLM, cross_entropy
from isthmus.models.gpt_neo import GPTNeo
from isthmus.models.gpt_neox import GPTNeoX

SIZES = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61, "sequence_length": 8}
SPECS = {"gpt_neox": GPTNeoX(**SIZES), "gpt_neo": GPTNeo(**SIZES)}  # an own head, and one tied to the embedding
NUM_TOKENS = 5 * 8
CHUNKED, WHOLE = 61 * 16, 61 * NUM_TOKENS  # 16 tokens at once: two chunks and a half


def tokens_of(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(61, (5, 9), generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", CHUNKED)


class LargestLogits(TorchDispatchMode):
    """The most values in any tensor whose last dimension is the vocabulary, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and 61 in (leaf.shape[-1], leaf.shape[0]):
                others = leaf.numel() // 61
                if others != SIZES["hidden_size"]:  # the head, and its gradient
                    self.num_tokens = max(self.num_tokens, others)
        return result


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(tokens_of())
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(name: str, dtype: torch.dtype, monkeypatch) -> None:
    """In bfloat16 (autocast) gradients round; the head's is summed in float32, where torch sums once."""
    whole, parts = SPECS[name].build(), SPECS[name].build()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected, expected_grads = loss_and_gradients(whole)
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", CHUNKED)
        with LargestLogits() as logits:
            loss, grads = loss_and_gradients(parts)
    assert logits.num_tokens == 16
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert list(grads) == list(expected_grads)
    for key, grad in grads.items():
        assert grad.dtype == torch.float32
        error = (grad - expected_grads[key]).norm() / expected_grads[key].norm()
        assert error < (1e-6 if dtype == torch.float32 else 2**-8), key


def test_a_small_batch_is_one_chunk_and_today_s_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SPECS["gpt_neox"].build()
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", WHOLE)
    tokens = tokens_of()["tokens"]
    logits = model.network(input_ids=tokens[:, :-1]).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    with LargestLogits() as seen:
        assert torch.equal(model(tokens_of()), expected)
    assert seen.num_tokens == NUM_TOKENS


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2**-8)], ids=str)
def test_the_kernel_is_the_cross_entropy_and_its_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """Against float64. What is missing to an almost certain token's probability is rounded once, not cancelled."""
    logits = torch.randn(7, 61, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, 5] = 9.0
    targets = torch.tensor([0, 60, 4, 5, 5, 1, 2])
    exact = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets, reduction="sum")
    expected.backward()
    loss, grad = cross_entropy.loss_and_gradient(logits, targets, 0.25)
    assert (loss.dtype, grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), 0.25 * exact.grad, rtol=tolerance, atol=0)


def test_evaluation_computes_no_gradients(chunked: None) -> None:
    model = SPECS["gpt_neox"].build()
    expected = model(tokens_of()).detach()
    with torch.no_grad(), LargestLogits() as logits:
        loss = model(tokens_of())
    assert torch.equal(loss, expected)
    assert logits.num_tokens == 16
    assert loss.grad_fn is None


def test_a_second_backward_pass_is_refused(chunked: None) -> None:
    loss = SPECS["gpt_neox"].build()(tokens_of())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_head_gets_no_gradient(chunked: None) -> None:
    model = SPECS["gpt_neox"].build()
    model.network.lm_head.weight.requires_grad_(False)
    model(tokens_of()).backward()
    assert model.network.lm_head.weight.grad is None
    assert model.network.gpt_neox.embed_in.weight.grad.norm() > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_steps_with_accumulation_and_clipping_are_the_same(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 whole logits are taken: gradients need the loss scale."""

    def train() -> list[float]:
        model = SPECS["gpt_neo"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = SupervisedStep(model, optimizer, micro_batch_size=3, clip_norm=0.5, precision=precision)
        with LargestLogits() as logits:
            metrics = [step(tokens_of(seed)) for seed in range(4)]
        seen.append(logits.num_tokens)
        return [value for each in metrics for value in (each["loss"], each["grad_norm"])]

    seen: list[int] = []
    expected = train()
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", CHUNKED)
    assert train() == pytest.approx(expected, rel=1e-5 if precision == "float32" else 1e-2)
    assert seen == [24, 24 if precision == "float16" else 16]


def test_a_loss_that_is_not_finite_makes_the_gradient_so(chunked: None) -> None:
    model = SPECS["gpt_neox"].build()
    with torch.no_grad():
        model.network.lm_head.weight[3, 3] = torch.inf
    assert SupervisedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))(tokens_of())["skipped"] == 1.0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_network_that_changes_its_logits_is_asked_for_all_of_them(in_place: bool, chunked: None) -> None:
    """As Gemma's soft cap does, or Cohere's scale."""
    model = SPECS["gpt_neox"].build()
    forward, calls = model.network.forward, []

    def scaled(**given: Any) -> Any:
        calls.append(len(given["input_ids"]))
        output = forward(**given)
        output.logits = output.logits.mul_(2) if in_place else output.logits * 2
        return output

    model.network.forward = scaled
    logits = forward(input_ids=tokens_of()["tokens"][:, :-1]).logits * 2
    expected = cross_entropy.next_token_loss(logits, tokens_of()["tokens"])
    for _ in range(2):
        assert torch.equal(model(tokens_of()), expected)
    assert len(calls) == 3  # it found out once


def test_models_are_what_they_were_outside_a_forward_pass(chunked: None) -> None:
    model = SPECS["gpt_neox"].build()
    model(tokens_of())
    assert isinstance(model, CausalLM)
    assert "forward" not in vars(model.network.lm_head)
    assert model.network(input_ids=tokens_of()["tokens"]).logits.shape == (5, 9, 61)


def test_chunks_are_powers_of_two_tokens() -> None:
    sizes = {vocab: cross_entropy._chunk_size(vocab) for vocab in (256, 50304, 2**28, 2**29)}
    assert sizes == {256: 2**20, 50304: 4096, 2**28: 1, 2**29: 1}
