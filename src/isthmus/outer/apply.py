"""What a decided sync does to its fragment: to anchor, local parameters and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from isthmus.compress.base import is_finite
from isthmus.core.fragment import Fragment
from isthmus.core.types import Tensors
from isthmus.outer.merge import KeepProgress, Merge, Replace
from isthmus.outer.offload import Offload
from isthmus.outer.sync import Outcome, Sync, zeros


def apply(
    fragment: Fragment,
    sync: Sync | None,
    outcome: Outcome,
    merge: Merge,
    outer_optimizer: torch.optim.Optimizer,
    newer: Sync | None,
    plain: bool,
    closing: bool,
    offload: Offload,
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
        offload: where outer state is, before and after.
    """
    left_out = sync is not None and sync.left_out
    rule: Merge = Replace() if plain or left_out else merge
    with offload.fetched(fragment, outer_optimizer):
        gradients = list[torch.Tensor]()
        for own_now, *others in zip(_own_now(fragment, newer, closing), outcome.mean, outcome.message, strict=True):
            mean, own_then = offload.get(others, fragment.device)
            if not rule.replicated and not is_finite(own_now):
                own_now = own_then  # what went wrong since the capture must not reach a private anchor
            gradients.append(rule.outer_gradient(mean, own_then, own_now, outcome.share))
        rule = KeepProgress() if closing and not (plain or left_out) else rule
        then = fragment.params
        if rule.keeps_progress:
            left = offload.get(sync.own, fragment.device) if sync and not sync.detached else zeros(fragment)
            then = [anchor.detach() - own for anchor, own in zip(fragment.anchor, left, strict=True)]
        _outer_step(fragment, gradients, outer_optimizer, plain)
        for param, before, anchor in zip(fragment.params, then, fragment.anchor, strict=True):
            param.copy_(rule.resume(param.float(), before, anchor.detach()))
    for buffer, value in zip(fragment.averaged, outcome.buffers, strict=False):  # none without a sync
        buffer.copy_(value)
    if sync:
        fragment.state = outcome.state
        fragment.version += 1


def refuse(fragment: Fragment, sync: Sync, newer: Sync | None, offload: Offload) -> None:
    """Lose nothing of a refused sync: its pseudo-gradient rides in the fragment's next one."""
    if sync.left_out:
        return
    own = offload.get(sync.own, fragment.device)
    if newer:
        torch._foreach_add_(newer.own, own)
    if sync.detached:
        for param, anchor, lost in zip(fragment.params, fragment.anchor, own, strict=True):
            param.copy_(anchor if newer else param - lost)


def start_over(fragments: list[Fragment], pending: Iterable[Sync]) -> None:
    """Go on from the anchors, in all fragments: bad values of one have spread to the others."""
    for sync in pending:
        sync.detached = True
    for fragment in fragments:
        for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
            param.copy_(anchor)


def _own_now(fragment: Fragment, newer: Sync | None, closing: bool) -> Iterator[torch.Tensor]:
    """This worker's pseudo-gradient of today, one tensor at a time."""
    if newer or closing:
        yield from newer.own if newer else zeros(fragment)
    else:
        yield from (a.detach() - p.float() for a, p in zip(fragment.anchor, fragment.params, strict=True))


def _outer_step(fragment: Fragment, gradients: Tensors, outer_optimizer: torch.optim.Optimizer, plain: bool) -> None:
    if plain:
        torch._foreach_sub_([anchor.detach() for anchor in fragment.anchor], gradients)
        return
    for anchor, gradient in zip(fragment.anchor, gradients, strict=True):
        anchor.grad = gradient
    outer_optimizer.step()  # skips the anchors of other fragments: they have no gradient
    outer_optimizer.zero_grad(set_to_none=True)
