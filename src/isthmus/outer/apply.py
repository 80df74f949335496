"""What a decided sync does to its fragment: to anchor, local parameters and memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from isthmus.compress.base import is_finite
from isthmus.core.fragment import Fragment
from isthmus.core.types import Tensors
from isthmus.outer.merge import KeepProgress, Merge, Replace
from isthmus.outer.sync import Outcome, Sync


def apply(
    fragment: Fragment,
    sync: Sync | None,
    outcome: Outcome,
    merge: Merge,
    outer_optimizer: torch.optim.Optimizer,
    newer: Sync | None,
    plain: bool,
    closing: bool,
) -> None:
    """Take the outer step of a committed sync, and let the local parameters go on from there.

    Args:
        fragment: the sync's.
        sync: what was sent; None for the empty sync before the first one (full delay).
        outcome: what came back.
        merge: the method's.
        outer_optimizer: of all anchors.
        newer: what was captured of the fragment just now (full delay).
        plain: the anchor becomes the plain mean, without learning rate or momentum, and replaces the local values.
        closing: the run ends: progress made since the capture stays in the local parameters, to be sent on its own.
    """
    left_out = sync is not None and sync.left_out
    rule: Merge = Replace() if plain or left_out else merge
    if newer:
        own_now = newer.own
    elif closing:
        own_now = zeros(fragment)
    else:
        own_now = _subtract(fragment.anchor, fragment.params)
    if not rule.replicated:  # what went wrong since the capture must not reach a private anchor
        own_now = [n if is_finite(n) else then for n, then in zip(own_now, outcome.message, strict=True)]
    gradients = [
        rule.outer_gradient(*of_one, outcome.share)
        for of_one in zip(outcome.mean, outcome.message, own_now, strict=True)
    ]
    rule = KeepProgress() if closing and not (plain or left_out) else rule
    then = fragment.params
    if rule.keeps_progress:
        left = sync.own if sync and not sync.detached else zeros(fragment)
        then = _subtract(fragment.anchor, left)
    _outer_step(fragment, gradients, outer_optimizer, plain)
    for param, before, anchor in zip(fragment.params, then, fragment.anchor, strict=True):
        param.copy_(rule.resume(param.float(), before, anchor.detach()))
    if sync:
        fragment.state = outcome.state
        fragment.version += 1


def refuse(fragment: Fragment, sync: Sync, newer: Sync | None) -> None:
    """Lose nothing of a refused sync: its pseudo-gradient rides in the fragment's next one."""
    if sync.left_out:
        return
    if newer:
        torch._foreach_add_(newer.own, sync.own)
    if sync.detached:
        for param, anchor, own in zip(fragment.params, fragment.anchor, sync.own, strict=True):
            param.copy_(anchor if newer else param - own)


def start_over(fragments: list[Fragment], pending: Iterable[Sync]) -> None:
    """Go on from the anchors, in all fragments: bad values of one have spread to the others."""
    for sync in pending:
        sync.detached = True
    for fragment in fragments:
        for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
            param.copy_(anchor)


def zeros(fragment: Fragment) -> Tensors:
    """Zeros in the shapes of the fragment, without memory of their own."""
    return [torch.zeros((), device=anchor.device).expand(anchor.shape) for anchor in fragment.anchor]


def _outer_step(fragment: Fragment, gradients: Tensors, outer_optimizer: torch.optim.Optimizer, plain: bool) -> None:
    if plain:
        torch._foreach_sub_([anchor.detach() for anchor in fragment.anchor], gradients)
        return
    for anchor, gradient in zip(fragment.anchor, gradients, strict=True):
        anchor.grad = gradient
    outer_optimizer.step()  # skips the anchors of other fragments: they have no gradient
    outer_optimizer.zero_grad(set_to_none=True)


def _subtract(left: list[nn.Parameter], right: Tensors) -> Tensors:
    return [a.detach() - b.float() for a, b in zip(left, right, strict=True)]
