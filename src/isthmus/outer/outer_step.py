"""The outer step: a committed sync moves anchor and local parameters, a refused one loses no progress."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from isthmus.compress.base import is_finite
from isthmus.core import Fragment, Tensors
from isthmus.outer.in_flight import Outcome, Sync, zeros
from isthmus.outer.merge import KeepProgress, Merge, Replace
from isthmus.outer.offload import Offloader
from isthmus.outer.outer_sgd import Left, is_plain_sgd, take_sgd_step


@dataclass(frozen=True)
class OuterStep:
    """How one fragment takes its outer step."""

    merge: Merge  # the method's rule
    optimizer: torch.optim.Optimizer  # of all anchors
    offload: Offloader  # where outer state is, before and after

    def reads(self, sync: Sync | None) -> Tensors:
        """Return what the finish of a sync will read of it, once it has arrived."""
        if sync is None or sync.outcome is None or not sync.arrived or sync.outcome.exception():
            return []
        outcome = sync.result
        if not outcome.report.committed:
            return sync.pseudo_gradient
        reads_own = self.merge.kept or type(self.merge).outer_gradient is not Replace.outer_gradient
        return [*outcome.mean, *(sync.pseudo_gradient if reads_own else [])]

    def take(
        self,
        fragment: Fragment,
        sync: Sync | None,
        outcome: Outcome,
        newer: Sync | None,
        plain_lr: float | None,
        closing: bool,
    ) -> None:
        """Move the anchor by the mean, then let the local parameters go on by the merge rule.

        Args:
            fragment: the sync's.
            sync: what was sent; None for the empty sync before the first one (full delay).
            outcome: what came back.
            newer: what was captured of the fragment just now (full delay).
            plain_lr: the anchor moves by so much of the mean, without momentum, and replaces the local values; None: it
                takes the step of the outer optimizer.
            closing: the run ends: progress since the capture stays in the local parameters, to be sent on its own.
        """
        excluded = sync is not None and sync.excluded
        plain = plain_lr is not None
        rule: Merge = Replace() if plain or excluded else self.merge
        with self.offload.fetched(fragment):
            gradients = self._outer_gradients(rule, fragment, sync, outcome, newer, closing)
            rule = KeepProgress() if closing and not (plain or excluded) else rule
            left = None
            if rule.kept:
                own = self.offload.get(sync.pseudo_gradient) if sync and sync.held else zeros(fragment)
                left = Left(own, sync.held if sync else 0.0)
            if is_plain_sgd(self.optimizer) and not plain:
                take_sgd_step(self.optimizer, fragment, gradients, rule, left)
            else:
                self._take_any_step(fragment, gradients, rule, left, plain_lr)
        for buffer, value in zip(fragment.averaged, outcome.buffers, strict=False):  # no values without a sync
            buffer.copy_(value)
        if sync:
            fragment.state = outcome.compressor_state
            fragment.version += 1

    def refuse(self, fragment: Fragment, sync: Sync, newer: Sync | None) -> None:
        """Lose nothing of a refused sync: its pseudo-gradient rides in the fragment's next one."""
        own = self.offload.get(sync.pseudo_gradient)
        if newer is None:  # all of it goes back into the local parameters
            fragment.num_steps += sync.num_steps
            if sync.held < 1:
                torch._foreach_sub_(fragment.params, own, alpha=1 - sync.held)
            return
        torch._foreach_add_(newer.pseudo_gradient, own)
        newer.num_steps += sync.num_steps
        for param, anchor, unsent in zip(fragment.params, fragment.anchor, newer.pseudo_gradient, strict=True):
            if newer.held == 0:
                param.copy_(anchor)
            elif newer.held < 1:
                param.copy_(anchor - newer.held * unsent)

    def _outer_gradients(
        self,
        rule: Merge,
        fragment: Fragment,
        sync: Sync | None,
        outcome: Outcome,
        newer: Sync | None,
        closing: bool,
    ) -> Tensors:
        if type(rule).outer_gradient is Replace.outer_gradient:
            return self.offload.get(outcome.mean)
        gradients = []
        own_now, own_then = _own_now(fragment, newer, closing), sync.pseudo_gradient if sync else zeros(fragment)
        for now, *offloaded in zip(own_now, outcome.mean, own_then, strict=True):
            mean, then = self.offload.get(offloaded)
            if not rule.replicated and not is_finite(now):
                now = then  # what went wrong since the capture must not reach a private anchor
            gradients.append(rule.outer_gradient(mean, then, now, outcome.weight))
        return gradients

    def _take_any_step(
        self, fragment: Fragment, gradients: Tensors, rule: Merge, left: Left | None, plain_lr: float | None
    ) -> None:
        """Move anchors by the plain mean times `plain_lr`, or any optimizer, then the parameters by the merge rule."""
        then = fragment.params
        if left is not None:
            pairs = zip(fragment.anchor, left.pseudo_gradient, strict=True)
            then = [anchor.detach() - left.held * own for anchor, own in pairs]
        if plain_lr is not None:
            torch._foreach_sub_([anchor.detach() for anchor in fragment.anchor], gradients, alpha=plain_lr)
        else:
            for anchor, gradient in zip(fragment.anchor, gradients, strict=True):
                anchor.grad = gradient
            self.optimizer.step()  # skips the anchors of other fragments: they have no gradient
            self.optimizer.zero_grad(set_to_none=True)
        for param, before, anchor in zip(fragment.params, then, fragment.anchor, strict=True):
            param.copy_(rule.resume(param.float(), before, anchor.detach()))


def _own_now(fragment: Fragment, newer: Sync | None, closing: bool) -> Iterator[torch.Tensor]:
    """Yield this worker's pseudo-gradient of today, one tensor at a time."""
    if newer or closing:
        yield from newer.pseudo_gradient if newer else zeros(fragment)
    else:
        yield from (a.detach() - p.float() for a, p in zip(fragment.anchor, fragment.params, strict=True))
