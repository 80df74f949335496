"""SGD with momentum on the anchors, and what becomes of the local parameters, in one pass over the memory.

With g the outer gradient, m the momentum and a the anchor: m <- mu m + g, then a <- a - lr (g + mu m) by Nesterov, or
a <- a - lr m (DiLoCo, arXiv 2311.08105). `torch.optim.SGD` computes the same, but leaves open where a product is fused
with a sum; here each is rounded, so anchors have the same bits on every kind of machine. The optimizer keeps the state
and the settings: it saves and loads as ever.
"""

from dataclasses import dataclass
from typing import Any

import torch

from isthmus.core import Fragment, Tensors
from isthmus.core.kernels import run_kernel
from isthmus.outer.merge import KeepProgress, Merge, Mix, Replace


@dataclass(frozen=True)
class Left:
    """What local parameters still hold of a sync that is being finished."""

    pseudo_gradient: Tensors  # the sync's
    held: float  # how much of it


_OTHERS = ("dampening", "weight_decay", "maximize", "differentiable")  # settings that have no place here


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is SGD that at most has momentum."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return type(optimizer) is torch.optim.SGD and not any(group[name] for group in groups for name in _OTHERS)


def take_sgd_step(
    optimizer: torch.optim.Optimizer, fragment: Fragment, gradients: Tensors, rule: Merge, left: Left | None
) -> None:
    """Move a fragment's anchors, and its parameters by the merge rule.

    Args:
        optimizer: a plain SGD of all anchors, as `is_plain_sgd` says.
        fragment: whose anchors and parameters are moved.
        gradients: outer gradients, float32, in the shapes of the anchors.
        rule: what becomes of the parameters.
        left: for rules that keep progress: what the parameters still hold of what was sent.
    """
    settings = {anchor: group for group in optimizer.param_groups for anchor in group["params"]}
    lefts, held = (left.pseudo_gradient, left.held) if left else ([None] * len(gradients), 0.0)
    for anchor, param, gradient, own in zip(fragment.anchor, fragment.params, gradients, lefts, strict=True):
        group = settings[anchor]
        momentum = _momentum(optimizer, anchor) if group["momentum"] else None
        _step(anchor.detach(), momentum, gradient, param, own, held, group, rule)


def _momentum(optimizer: torch.optim.Optimizer, anchor: torch.nn.Parameter) -> torch.Tensor:
    state = optimizer.state[anchor]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(anchor)
    buffer: torch.Tensor = state["momentum_buffer"]
    return buffer


def _step(
    anchor: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: torch.Tensor,
    param: torch.Tensor,
    own: torch.Tensor | None,
    held: float,
    group: dict[str, Any],
    rule: Merge,
) -> None:
    mu, lr = group["momentum"], group["lr"]
    form = _form(rule)
    if form is not None:
        shares = (rule.alpha, 1 - rule.alpha) if isinstance(rule, Mix) else (rule.kept, held)
        tensors = [anchor, gradient, param, anchor if momentum is None else momentum, anchor if own is None else own]
        flat = [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]
        numbers = (momentum is not None, bool(group["nesterov"]), form)
        if run_kernel("outer_sgd", flat, *map(int, numbers), factors=(lr, mu, *shares)):
            return
    then = anchor - held * own if own is not None else param
    step = gradient
    if momentum is not None:
        momentum.mul_(mu).add_(gradient)
        step = gradient + mu * momentum if group["nesterov"] else momentum
    anchor.sub_(lr * step)
    param.copy_(rule.resume(param.float(), then, anchor))


def _form(rule: Merge) -> int | None:
    """Return the number by which the kernel knows how the parameters go on; None where it does not."""
    forms = {Replace.resume: 0, Mix.resume: 1, KeepProgress.resume: 2}
    return forms.get(type(rule).resume)
