"""What a worker that comes or comes back takes over from the others, and what it keeps of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from isthmus.core.types import State, Tensors
from isthmus.outer.apply import zeros
from isthmus.outer.sync import Outcome, Sync, arrived

if TYPE_CHECKING:
    from isthmus.outer.loop import OuterLoop


def shared_state(loop: OuterLoop) -> State:
    """Copies of all that the workers agree on; the caller keeps the training thread from changing it meanwhile.

    A sync in flight comes with its mean, where that is known; where it is still being looked for workers, whoever
    takes this over asks to be one of them.
    """
    in_flight, transport = list[State](), loop.transport_state
    for sync in sorted(loop.in_flight.values(), key=lambda sync: sync.outer_step):
        outcome = sync.outcome.result() if sync.outcome and sync.outcome.done() else None
        mean = [tensor.clone() for tensor in outcome.mean] if outcome else []
        known = {"known": outcome is not None, "committed": bool(mean), "mean": mean}
        in_flight.append({"fragment": sync.fragment, "outer_step": sync.outer_step} | known)
        transport = outcome.transport if outcome else transport
    return {
        "stage": loop.stage,
        "inner_steps": loop.inner_steps,
        "outer_steps": loop.outer_steps,
        "anchors": [[anchor.detach().clone() for anchor in fragment.anchor] for fragment in loop.fragments],
        "versions": [fragment.version for fragment in loop.fragments],
        "outer_optimizer": copy.deepcopy(loop.outer_optimizer.state_dict()),
        "in_flight": in_flight,
        "transport": copy.deepcopy(transport),
    }


@torch.no_grad()
def adopt(loop: OuterLoop, state: State) -> list[Sync]:
    """Take over the others' shared state, and keep the progress that it does not hold yet.

    Returns:
        Syncs that are still looking for workers: to be sent again, with nothing of this worker in them.
    """
    loop.transport.load_state_dict(state["transport"])
    loop.transport_state = state["transport"]
    rider, in_flight = loop.transport.rider, loop.in_flight.values()
    contributed = any(loop.transport.contributed_to(sync.outer_step) for sync in in_flight)
    keeps = rider is None or rider.settle(contributed)
    progress = [_progress(loop, index) if keeps else zeros(f) for index, f in enumerate(loop.fragments)]
    loop.stage = state["stage"]
    loop.inner_steps, loop.outer_steps = state["inner_steps"], state["outer_steps"]
    loop.outer_optimizer.load_state_dict(state["outer_optimizer"])
    for fragment, anchors, version, own in zip(
        loop.fragments, state["anchors"], state["versions"], progress, strict=True
    ):
        fragment.version = version
        for param, anchor, value, part in zip(fragment.params, fragment.anchor, anchors, own, strict=True):
            anchor.copy_(value)
            param.copy_(anchor.detach() - part)
    loop.in_flight = {}
    again = []
    for saved in state["in_flight"]:
        fragment = loop.fragments[saved["fragment"]]
        nothing = [torch.zeros_like(anchor.detach()) for anchor in fragment.anchor]
        sync = Sync(saved["fragment"], nothing, detached=False, outer_step=saved["outer_step"])
        if saved["known"]:
            mean = saved["mean"] if saved["committed"] else []
            now = loop.transport.now()
            outcome = Outcome.without_own(fragment, mean, 0.0, state["transport"], now, sync.outer_step)
            sync.outcome = arrived(outcome)
            loop.in_flight[sync.fragment] = sync
        else:
            again.append(sync)
    return again


def _progress(loop: OuterLoop, index: int) -> Tensors:
    """What this worker has done to a fragment that the others' state does not hold: a pseudo-gradient."""
    fragment, sync = loop.fragments[index], loop.in_flight.get(index)
    own = [anchor.detach() - param.float() for anchor, param in zip(fragment.anchor, fragment.params, strict=True)]
    if sync is None:
        return own
    contributed = loop.transport.contributed_to(sync.outer_step)
    if contributed and sync.outcome is not None:
        fragment.state = sync.outcome.result().state  # it was sent and counts: so does what was not sent of it
    if sync.detached and not contributed:
        return _plus(own, sync.own)
    if contributed and not sync.detached:
        return _plus(own, [-tensor for tensor in sync.own])
    return own


def _plus(left: Tensors, right: Iterable[torch.Tensor]) -> Tensors:
    return [a + b for a, b in zip(left, right, strict=True)]
