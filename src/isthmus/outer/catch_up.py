"""What a worker that comes or comes back takes over from the others, and what it keeps of its own."""

from __future__ import annotations

import copy
import json
import time
from typing import TYPE_CHECKING

import torch

from isthmus.core.fragment import Fragment
from isthmus.core.streams import hand_over
from isthmus.core.types import State, Tensors
from isthmus.outer.sync import Outcome, Sync, arrived, averaged_buffers, pseudo_gradient, zeros
from isthmus.transport.base import TransportError

if TYPE_CHECKING:
    from isthmus.outer.loop import OuterLoop

_POLL_SECONDS = 0.01
_LONELY_SECONDS = 1.0  # how long a sync may look for peers until its state is handed over all the same
_COPIES = 6  # anchors, outer optimizer, means in flight: what the shared state may hold of a model
_REST_BYTES = 2**26


def shared_state(loop: OuterLoop, wait_seconds: float) -> State:
    """Copies of all that the workers agree on; may be called on any thread.

    A sync in flight comes with its mean; one for which training waits is finished first. One that still looks for
    workers after a while comes without: perhaps it waits for the very worker that asks, which is to send it too.

    Args:
        loop: whose state it is.
        wait_seconds: for a sync that is on its way to be decided.
    """
    begin = time.monotonic()
    while time.monotonic() < begin + wait_seconds:
        with loop.changing:
            undecided = [sync for sync in loop.in_flight.values() if sync.outcome and not sync.outcome.done()]
            about_to_finish = bool(loop.in_flight) and not undecided and loop.rounds.blocking(loop.inner_steps)
            patient = time.monotonic() < begin + _LONELY_SECONDS
            lonely = not any(sync.has_peers for sync in undecided)
            if not (undecided or about_to_finish) or (lonely and not patient):
                return _copy_state(loop)
        time.sleep(_POLL_SECONDS)
    raise TransportError(f"a sync was not decided within {wait_seconds:g} s")


def most_bytes(fragments: list[Fragment]) -> int:
    """That a shared state of these fragments may take."""
    return _COPIES * 4 * sum(anchor.numel() for fragment in fragments for anchor in fragment.anchor) + _REST_BYTES


def _copy_state(loop: OuterLoop) -> State:
    in_flight, finished = list[State](), copy.deepcopy(loop.transport_state)
    latest = finished
    for sync in sorted(loop.in_flight.values(), key=lambda sync: sync.outer_step):
        outcome = sync.outcome.result() if sync.outcome and sync.outcome.done() else None
        hand_over(outcome.mean if outcome else [])
        mean = [tensor.clone() for tensor in outcome.mean] if outcome else []
        message_fraction = outcome.report.message_fraction if outcome else loop.rounds.message_fraction
        latest = copy.deepcopy(outcome.transport) if outcome else latest
        known = {
            "known": outcome is not None,
            "committed": bool(mean),
            "mean": mean,
            "message_fraction": message_fraction,
        }
        known["buffers"] = [tensor.clone() for tensor in outcome.buffers] if outcome else []
        in_flight.append({"fragment": sync.fragment, "outer_step": sync.outer_step, "transport": latest} | known)
    state = {
        "stage": loop.stage,
        "inner_steps": loop.inner_steps,
        "outer_steps": loop.outer_steps,
        "rounds": loop.rounds.state_dict(),
        "anchors": [[anchor.detach().clone() for anchor in fragment.anchor] for fragment in loop.fragments],
        "buffers": [[buffer.clone() for buffer in _shared_buffers(fragment)] for fragment in loop.fragments],
        "versions": [fragment.version for fragment in loop.fragments],
        "outer_optimizer": copy.deepcopy(loop.outer_optimizer.state_dict()),
        "in_flight": in_flight,
        "finished": finished,  # what the transport remembered after the last sync in the anchors
        "transport": latest,  # and after the last one decided
    }
    return state | {"stand": _stand(state)}


def _stand(state: State) -> str:
    """What is equal in the states of a worker's ranks where they belong together."""
    parts = [state[name] for name in ("stage", "outer_steps", "rounds", "versions")]
    chains = [state[name].get("chain") for name in ("finished", "transport")]
    known = ("fragment", "outer_step", "known", "committed")
    return json.dumps([*parts, chains, [[sync[name] for name in known] for sync in state["in_flight"]]])


@torch.no_grad()
def adopt(loop: OuterLoop, state: State) -> list[Sync]:
    """Take over the others' shared state, and keep the progress that it does not hold yet.

    Returns:
        Syncs that are still looking for workers: to be sent again, with nothing of this worker in them.
    """
    elastic = loop.transport.elastic
    assert elastic is not None
    elastic.load_state_dict(state["transport"])
    loop.transport_state = state["finished"]
    replicated_state, in_flight = elastic.replicated_state, loop.in_flight.values()
    contributed = any(elastic.contributed_to(sync.outer_step) for sync in in_flight)
    keeps = replicated_state is None or replicated_state.reconcile(contributed)
    progress = [loop.offload.put(_progress(loop, i) if keeps else zeros(f)) for i, f in enumerate(loop.fragments)]
    loop.stage = state["stage"]
    loop.inner_steps, loop.outer_steps = state["inner_steps"], state["outer_steps"]
    loop.rounds.load_state_dict(state["rounds"])
    loop.outer_optimizer.load_state_dict(state["outer_optimizer"])
    for fragment, anchors, version, own in zip(
        loop.fragments, state["anchors"], state["versions"], progress, strict=True
    ):
        fragment.version = version
        for param, anchor, value, part in zip(fragment.params, fragment.anchor, anchors, own, strict=True):
            anchor.copy_(value)
            param.copy_(loop.offload.get(anchor.detach(), param.device) - loop.offload.get(part, param.device))
    for fragment, buffers in zip(loop.fragments, state["buffers"], strict=True):
        for buffer, value in zip(_shared_buffers(fragment), buffers, strict=True):
            buffer.copy_(value)
    loop.in_flight = {}
    again = []
    for saved in state["in_flight"]:
        fragment = loop.fragments[saved["fragment"]]
        nothing = [torch.zeros_like(param, dtype=torch.float32) for param in fragment.params]
        buffers = averaged_buffers(fragment)
        sync = Sync(saved["fragment"], nothing, detached=False, buffers=buffers, outer_step=saved["outer_step"])
        if saved["known"]:
            mean = saved["mean"] if saved["committed"] else []
            parts = (mean, 0.0, saved["transport"], loop.transport.now(), sync.outer_step, saved["message_fraction"])
            outcome = Outcome.without_own(fragment, *parts)
            outcome.buffers = saved["buffers"]
            sync.outcome = arrived(outcome)
            loop.in_flight[sync.fragment] = sync
        else:
            again.append(sync)
    return again


def _shared_buffers(fragment: Fragment) -> Tensors:
    return [*fragment.averaged, *fragment.replicated]


def _progress(loop: OuterLoop, index: int) -> Tensors:
    """What this worker has done to a fragment that the others' state does not hold: a pseudo-gradient."""
    fragment, sync = loop.fragments[index], loop.in_flight.get(index)
    own = pseudo_gradient(fragment, loop.offload)
    if sync is None:
        return own
    contributed = loop.transport.elastic is not None and loop.transport.elastic.contributed_to(sync.outer_step)
    if contributed and sync.outcome is not None:
        fragment.state = sync.outcome.result().state  # it was sent and counts: so does what was not sent of it
    if sync.detached != contributed:
        sign = -1 if contributed else 1
        torch._foreach_add_(own, loop.offload.get(sync.own, fragment.device), alpha=sign)
    return own
