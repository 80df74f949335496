"""The outer loop: the one stateful class of the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isthmus.compress.base import Compressor
from isthmus.core.fragment import Fragment
from isthmus.core.schedule import SyncSchedule
from isthmus.core.types import SyncReport, Tensors, UserError
from isthmus.outer.anchor import fingerprint
from isthmus.outer.background import Background
from isthmus.outer.merge import KeepProgress, Merge, Mix, Replace
from isthmus.outer.sync import Exchange, Outcome, Sync, copy_dicts
from isthmus.transport.base import Transport

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OuterLoop:
    """Syncs a model with its peers: call `step()` after every inner step.

    All workers build it alike and take the same number of inner steps. Nothing (anchor, outer optimizer,
    compressor memory) changes before a sync is committed by everybody.

    Args:
        fragments: the model's fragments (`isthmus.core.split_*`).
        schedule: when each of them is sent and finished.
        compressor: how the mean pseudo-gradient is taken.
        transport: who takes part; joined here, left by `close`.
        outer_optimizer: makes the optimizer of all anchors, e.g. `partial(SGD, lr=0.7, momentum=0.9, nesterov=True)`.
        merge: how the mean becomes the new anchor and where local parameters go on from.
        hash_every: syncs between two comparisons of the anchors' hash over all workers.

    Raises:
        Drift: anchors that must be equal are not (here already when workers start from different weights).
        PeerLost: workers died in a world that cannot go on without them.
    """

    def __init__(
        self,
        fragments: list[Fragment],
        schedule: SyncSchedule,
        compressor: Compressor,
        transport: Transport,
        outer_optimizer: OuterOptimizer,
        merge: Merge = Replace(),  # noqa: B008 (a frozen value)
        hash_every: int = 10,
    ) -> None:
        _check(fragments, schedule, transport, merge)
        self.fragments, self.schedule, self.transport, self.merge = fragments, schedule, transport, merge
        self.replicated = compressor.replicated and merge.replicated
        self.exchange = Exchange(compressor, transport, not merge.replicated, hash_every if self.replicated else 0)
        self._delayed = schedule.overlap_steps == schedule.local_steps
        self.outer_optimizer = outer_optimizer([anchor for fragment in fragments for anchor in fragment.anchor])
        self.inner_steps = 0
        self.outer_steps = 0  # syncs sent so far, over all fragments
        self._in_flight: dict[int, Sync] = {}
        self._reports: list[SyncReport] = []
        self._background = Background()
        transport.join(self)
        self._background.submit(self._compare_anchors).result()

    @torch.no_grad()
    def step(self) -> list[SyncReport]:
        """Count one inner step; begin and finish the syncs that are due. Returns a report per finished sync."""
        self.inner_steps += 1
        captured = [self._capture(index) for index in self.schedule.begins(self.inner_steps)]
        if self.schedule.blocking(self.inner_steps):
            self._send(captured)
            captured = []
        for index in self.schedule.finishes(self.inner_steps):
            newer = next((sync for sync in captured if sync.fragment == index), None)
            self._finish(index, newer, plain=self.schedule.warm(self.inner_steps))
        self._send(captured)
        return self._take_reports()

    @torch.no_grad()
    def finish(self) -> list[SyncReport]:
        """End the run: finish what is in flight, then average once more, plainly, what was not captured yet.

        Afterwards the local parameters equal the anchors, unless a sync was refused.
        """
        for index in sorted(self._in_flight, key=lambda index: self._in_flight[index].outer_step):
            self._finish(index, closing=True)
        rest = set(range(len(self.fragments))) - set(self.schedule.begins(self.inner_steps))
        self._send([self._capture(index) for index in sorted(rest)] if self.inner_steps else [])
        for index in sorted(self._in_flight):
            self._finish(index, plain=True)
        reports = self._take_reports()
        if all(report.committed for report in reports):
            for fragment in self.fragments:
                for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
                    param.copy_(anchor)
        return reports

    def close(self) -> None:
        """Let go of the peers, once what is in flight has arrived, and of the communication thread."""
        self._background.submit(self.transport.leave).result()
        self._background.close()

    def anchor_hash(self) -> str:
        """16 hexadecimal digits that differ when any bit of any anchor differs."""
        return fingerprint(anchor for fragment in self.fragments for anchor in fragment.anchor).hex()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's own parameters; syncs in flight as what was captured for them."""
        return {
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "fragments": [
                {"anchor": [a.detach() for a in f.anchor], "state": copy_dicts(f.state), "version": f.version}
                for f in self.fragments
            ],
            "in_flight": [
                {"fragment": sync.fragment, "own": sync.own, "detached": sync.detached, "outer_step": sync.outer_step}
                for sync in sorted(self._in_flight.values(), key=lambda sync: sync.outer_step)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: syncs that were in flight are sent again."""
        for sync in self._in_flight.values():
            self._wait(sync)
        self.inner_steps, self.outer_steps = state_dict["inner_steps"], state_dict["outer_steps"]
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        for fragment, saved in zip(self.fragments, state_dict["fragments"], strict=True):
            for anchor, value in zip(fragment.anchor, saved["anchor"], strict=True):
                anchor.copy_(value)
            fragment.state, fragment.version = copy_dicts(saved["state"]), saved["version"]
        self._in_flight = {}
        for saved in state_dict["in_flight"]:
            self._dispatch(Sync(**saved))

    def _capture(self, index: int) -> Sync:
        fragment = self.fragments[index]
        own = [anchor.detach() - param.float() for anchor, param in zip(fragment.anchor, fragment.params, strict=True)]
        if index in self._in_flight and self.merge.keeps_progress:  # on its way already: do not count it twice
            torch._foreach_sub_(own, self._in_flight[index].own)
        detached = self._delayed and not self.merge.keeps_progress and not self.schedule.warm(self.inner_steps)
        return Sync(index, own, detached)

    def _send(self, captured: list[Sync]) -> None:
        for sync in captured:
            sync.outer_step = self.outer_steps
            self.outer_steps += 1
            self._dispatch(sync)

    def _dispatch(self, sync: Sync) -> None:
        fragment = self.fragments[sync.fragment]
        job = partial(self.exchange.run, sync, fragment, copy_dicts(fragment.state), self.transport.now())
        sync.outcome = self._background.submit(job)
        self._in_flight[sync.fragment] = sync

    def _finish(self, index: int, newer: Sync | None = None, plain: bool = False, closing: bool = False) -> None:
        """Apply a sync, or, with a full delay and none sent yet, an empty one.

        Args:
            index: the fragment.
            newer: what was captured of it just now (full delay).
            plain: the anchor becomes the plain mean, without learning rate or momentum, and replaces the local values.
            closing: the run ends: progress made since the capture stays in the local parameters, to be sent on its own.
        """
        sync = self._in_flight.pop(index, None)
        outcome = self._wait(sync) if sync else self._empty(index)
        if sync and not outcome.report.committed:
            self._refuse(sync, newer)
            return
        fragment = self.fragments[index]
        merge: Merge = Replace() if plain else self.merge
        if newer:
            own_now = newer.own
        elif closing:
            own_now = _zeros(fragment)
        else:
            own_now = _subtract(fragment.anchor, fragment.params)
        gradients = [
            merge.outer_gradient(*of_one, outcome.share)
            for of_one in zip(outcome.mean, outcome.message, own_now, strict=True)
        ]
        merge = KeepProgress() if closing else merge
        then = fragment.params
        if merge.keeps_progress:
            left = sync.own if sync and not sync.detached else _zeros(fragment)
            then = _subtract(fragment.anchor, left)
        self._outer_step(fragment, gradients, plain)
        for param, before, anchor in zip(fragment.params, then, fragment.anchor, strict=True):
            param.copy_(merge.resume(param.float(), before, anchor.detach()))
        if sync:
            fragment.state = outcome.state
            fragment.version += 1

    def _outer_step(self, fragment: Fragment, gradients: Tensors, plain: bool) -> None:
        if plain:
            torch._foreach_sub_([anchor.detach() for anchor in fragment.anchor], gradients)
            return
        for anchor, gradient in zip(fragment.anchor, gradients, strict=True):
            anchor.grad = gradient
        self.outer_optimizer.step()  # skips the anchors of other fragments: they have no gradient
        self.outer_optimizer.zero_grad(set_to_none=True)

    def _refuse(self, sync: Sync, newer: Sync | None) -> None:
        """Lose nothing of a refused sync: its pseudo-gradient rides in the fragment's next one."""
        fragment = self.fragments[sync.fragment]
        if newer:
            torch._foreach_add_(newer.own, sync.own)
        if sync.detached:
            for param, anchor, own in zip(fragment.params, fragment.anchor, sync.own, strict=True):
                param.copy_(anchor if newer else param - own)

    def _wait(self, sync: Sync) -> Outcome:
        assert sync.outcome is not None
        before = self.transport.now()
        outcome = sync.outcome.result()
        self.transport.wait_until(outcome.end)
        waited = self.transport.now() - before
        self._reports.append(replace(outcome.report, hidden_seconds=max(0.0, outcome.report.seconds - waited)))
        return outcome

    def _empty(self, index: int) -> Outcome:
        """The sync before the first one: nobody had anything to send."""
        zeros = _zeros(self.fragments[index])
        report = SyncReport(-1, self.fragments[index].name, True, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
        return Outcome(report, zeros, zeros, {}, 1 / self.transport.num_workers, self.transport.now())

    def _compare_anchors(self) -> None:
        """Refuse to start from different weights."""
        peers = self.transport.quorum(0)
        self.transport.commit(peers, True, bytes.fromhex(self.anchor_hash()))

    def _take_reports(self) -> list[SyncReport]:
        reports, self._reports = self._reports, []
        return reports


def _zeros(fragment: Fragment) -> Tensors:
    """Zeros in the shapes of the fragment, without memory of their own."""
    return [torch.zeros((), device=anchor.device).expand(anchor.shape) for anchor in fragment.anchor]


def _subtract(left: list[nn.Parameter], right: Tensors) -> Tensors:
    return [a.detach() - b.float() for a, b in zip(left, right, strict=True)]


def _check(fragments: list[Fragment], schedule: SyncSchedule, transport: Transport, merge: Merge) -> None:
    if len(fragments) != schedule.num_fragments:
        raise UserError(
            f"the model is cut into {len(fragments)} fragments, the schedule expects {schedule.num_fragments}"
        )
    if isinstance(merge, Mix) and schedule.overlap_steps == schedule.local_steps:
        raise UserError("merge mix needs overlap_steps < local_steps; for a full delay use eager or keep_progress")
    if schedule.overlap_steps and not transport.limits.safe_to_overlap:
        raise UserError("this transport cannot run beside training: set overlap_steps to 0 or use the gloo backend")
