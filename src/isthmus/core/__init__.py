"""The foundation: types, fragments, schedules, registries. Imports torch only."""

from isthmus.core.fragment import Fragment, buffer_rules, split_balanced, split_strided, split_whole
from isthmus.core.registry import Registry, nearest
from isthmus.core.schedule import SyncSchedule
from isthmus.core.types import Peers, State, SyncReport, Tensors, UserError, WorkerGroup

SPLITS = Registry(
    "split",
    {
        "whole": "isthmus.core.fragment:split_whole",
        "strided": "isthmus.core.fragment:split_strided",
        "balanced": "isthmus.core.fragment:split_balanced",
    },
)

__all__ = [
    "SPLITS",
    "Fragment",
    "Peers",
    "Registry",
    "State",
    "SyncReport",
    "SyncSchedule",
    "Tensors",
    "UserError",
    "WorkerGroup",
    "buffer_rules",
    "nearest",
    "split_balanced",
    "split_strided",
    "split_whole",
]
