"""States that version 0.1.0 saved, under the names that they have today."""

from isthmus.core.types import State

_TOP = {"rounds": "schedule", "transport": "elastic"}
_SCHEDULE = {"effort": "message_fraction"}
_ELASTIC = {"rider": "replicated_state"}
_SYNC = {"own": "pseudo_gradient", "detached": "params_reset", "claim": "proposal"}


def with_present_names(state: State) -> State:
    """Return the state dict of an outer loop with today's keys, whichever version wrote it."""
    state = _renamed(state, _TOP)
    for key, names in (("schedule", _SCHEDULE), ("elastic", _ELASTIC)):
        state[key] = _renamed(state.get(key, {}), names)
    return state | {"in_flight": [_with_held(_renamed(sync, _SYNC)) for sync in state.get("in_flight", [])]}


def _with_held(sync: State) -> State:
    """Return a sync with the share of it that local parameters hold, which was all or nothing in version 0.1.0."""
    if "params_reset" not in sync:
        return sync
    rest = {key: value for key, value in sync.items() if key != "params_reset"}
    return rest | {"held": float(not sync["params_reset"])}


def _renamed(state: State, names: dict[str, str]) -> State:
    return {names.get(key, key): value for key, value in state.items()}
