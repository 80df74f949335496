"""The cross-entropy of the next token, from logits, or from hidden states without the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from typing_extensions import override

CHUNK_ELEMENTS = 2**28  # of the logits that exist at once: a GiB in float32
LossAndGradient = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, of logits [batch, seq, vocab] for tokens [batch, seq + 1] int64."""
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of logits [tokens, vocab], and its gradient times `scale` in their precision."""
    index = targets[:, None]
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = log_probs.gather(1, index)
    grad = log_probs.exp_().mul_(scale).to(logits.dtype)
    grad.scatter_(1, index, chosen.expm1().mul(scale).to(logits.dtype))  # probability - 1, rounded once
    return -chosen.sum(), grad


def chunked_next_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, kernel: LossAndGradient = loss_and_gradient
) -> torch.Tensor:
    """Return `next_token_loss(hidden @ weight.T, tokens)` up to rounding, in the memory of a few tokens' logits.

    Gradients are computed in the forward pass, so that no logits are computed twice; a backward pass scales them.

    Args:
        hidden: [batch, seq, size]
        weight: of the head, [vocab, size]
        tokens: [batch, seq + 1] int64
        kernel: `loss_and_gradient`, compiled perhaps.
    """
    mean: Any = _ChunkedMean.apply
    loss: torch.Tensor = mean(hidden.flatten(0, 1), weight, tokens[:, 1:].flatten(), kernel)
    return loss


class _ChunkedMean(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, kernel: LossAndGradient
    ) -> torch.Tensor:
        device, (num_tokens, _) = hidden.device.type, hidden.shape
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        inputs, matrix = hidden.to(dtype), weight.to(dtype)
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
        total, size = torch.zeros((), device=hidden.device), _chunk_size(len(weight))
        for part in (slice(start, start + size) for start in range(0, num_tokens, size)):
            loss, grad = kernel(linear(inputs[part], matrix), targets[part], 1 / num_tokens)
            total += loss
            if grad_hidden is not None:
                grad_hidden[part] = grad @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, grad.mT, inputs[part])
            del grad  # before the next chunk's logits
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total / num_tokens

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # in place, as the head's gradient is large: torch refuses a second backward pass
        scaled = (None if each is None else each.mul_(grad) for each in ctx.saved_tensors)
        return *scaled, None, None


def _chunk_size(vocab_size: int) -> int:
    """Return how many tokens' logits exist at once: a power of two, which divides most batches."""
    return 1 << max(0, (CHUNK_ELEMENTS // vocab_size).bit_length() - 1)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a sum, which may be kept in a higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
