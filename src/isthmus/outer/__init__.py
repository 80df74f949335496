"""The method: the outer loop and the rules by which it merges."""

from isthmus.core.registry import Registry
from isthmus.outer.anchor import anchored, fingerprint
from isthmus.outer.former_names import with_present_names
from isthmus.outer.guard import Guard
from isthmus.outer.loop import OuterLoop
from isthmus.outer.merge import Eager, KeepProgress, Merge, Mix, Replace
from isthmus.outer.offload import Offload
from isthmus.outer.rollback import Rollback
from isthmus.outer.state import OuterState

MERGES = Registry(
    "merge",
    {
        "replace": "isthmus.outer.merge:Replace",
        "mix": "isthmus.outer.merge:Mix",
        "eager": "isthmus.outer.merge:Eager",
        "keep_progress": "isthmus.outer.merge:KeepProgress",
    },
    methods=("outer_gradient", "resume"),
)

__all__ = [
    "MERGES",
    "Eager",
    "Guard",
    "KeepProgress",
    "Merge",
    "Mix",
    "Offload",
    "OuterLoop",
    "OuterState",
    "Replace",
    "Rollback",
    "anchored",
    "fingerprint",
    "with_present_names",
]
