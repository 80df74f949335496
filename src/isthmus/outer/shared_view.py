"""What a worker hands to one that joins: all that they agree on, and what has been decided of the syncs in flight."""

import json

from isthmus.core import Fragment, State
from isthmus.outer.in_flight import Sync


def shared_view(own: State, phase: str, fragments: list[Fragment], syncs: list[Sync]) -> State:
    """Return a worker's own state dict without what the others do not have, and with what has been decided meanwhile.

    `syncs` are those in flight, in the order in which they were sent.
    """
    decided, in_flight = own["elastic"], list[State]()  # "elastic" is as of the last finished sync, in the anchors
    for sync in syncs:
        decided = sync.result.elastic_state if sync.arrived else decided
        in_flight.append(sync.shared(decided, own["schedule"]["message_fraction"]))
    of_fragments = [
        {"anchor": saved["anchor"], "version": saved["version"], "buffers": fragment.shared_buffers}
        for fragment, saved in zip(fragments, own["fragments"], strict=True)
    ]
    own = {name: value for name, value in own.items() if name != "last_good"}
    shared = {"phase": phase, "fragments": of_fragments, "in_flight": in_flight, "elastic_decided": decided}
    return own | shared | {"consistency": _consistency(own | shared)}


def _consistency(shared: State) -> str:
    """Return what is equal in the shared states of a worker's ranks if they belong together."""
    counters = [shared[name] for name in ("phase", "outer_steps", "schedule")]
    versions = [fragment["version"] for fragment in shared["fragments"]]
    chains = [shared[name].get("chain") for name in ("elastic", "elastic_decided")]
    syncs = [[s[name] for name in ("fragment", "outer_step", "arrived", "void")] for s in shared["in_flight"]]
    results = [[bool(s["mean"]), bool(s["restored"])] for s in shared["in_flight"]]
    return json.dumps([*counters, versions, chains, syncs, results, shared.get("num_rollbacks")])
