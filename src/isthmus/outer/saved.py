"""The state of an outer loop as a checkpoint holds it, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus.core.types import State
from isthmus.outer.sync import Sync, copy_dicts

if TYPE_CHECKING:
    from isthmus.outer.loop import OuterLoop

_OF_SYNC = ("fragment", "own", "detached", "proposal", "buffers", "outer_step")
_NAMES_SINCE = {"rider": "replicated_state", "claim": "proposal", "effort": "message_fraction"}  # version 0.1.0


def saved_state(loop: OuterLoop) -> dict[str, Any]:
    """Everything but the model's own parameters; syncs in flight as what was captured for them."""
    return {
        "inner_steps": loop.inner_steps,
        "outer_steps": loop.outer_steps,
        "rounds": loop.rounds.state_dict(),
        "outer_optimizer": loop.outer_optimizer.state_dict(),
        "transport": loop.transport_state,
        "fragments": [
            {"anchor": [a.detach() for a in f.anchor], "state": copy_dicts(f.state), "version": f.version}
            for f in loop.fragments
        ],
        "in_flight": [
            {name: getattr(sync, name) for name in _OF_SYNC}
            for sync in sorted(loop.in_flight.values(), key=lambda sync: sync.outer_step)
        ],
    }


def restore(loop: OuterLoop, state: dict[str, Any]) -> list[Sync]:
    """Become what was saved; returns the syncs that were in flight, to be sent again."""
    loop.inner_steps, loop.outer_steps = state["inner_steps"], state["outer_steps"]
    loop.rounds.load_state_dict(_renamed(state["rounds"]))
    loop.outer_optimizer.load_state_dict(state["outer_optimizer"])
    loop.transport_state = _renamed(state["transport"])
    if loop.transport.elastic:
        loop.transport.elastic.load_state_dict(loop.transport_state)
    for fragment, saved in zip(loop.fragments, state["fragments"], strict=True):
        for anchor, value in zip(fragment.anchor, saved["anchor"], strict=True):
            anchor.copy_(value)
        fragment.state, fragment.version = copy_dicts(saved["state"]), saved["version"]
    loop.in_flight = {}
    syncs = [Sync(**_renamed(saved)) for saved in state["in_flight"]]
    for sync in syncs:
        sync.own = [tensor.to(loop.fragments[sync.fragment].device) for tensor in sync.own]
    return syncs


def _renamed(state: State) -> State:
    """A state that version 0.1.0 saved, under its present names."""
    return {_NAMES_SINCE.get(key, key): value for key, value in state.items()}
