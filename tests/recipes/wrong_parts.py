"""What somebody could take for parts of a method, and what a recipe may hold beside specs."""

import atexit
from functools import partial

import torch

from isthmus.compress import Cast
from isthmus.core import Peers, State, SyncSchedule, Tensors
from isthmus.recipes.base import Plan, Recipe


class Crash(Cast):
    """A compressor that fails at its first sync; something is printed after its exception."""

    def average(
        self, local: Tensors, state: State, peers: Peers, with_residual: bool = True
    ) -> tuple[Tensors, Tensors]:
        atexit.register(print, "a library says goodbye")
        raise ValueError("a bug of my own")


class Nothing:
    """A class without a method."""


def no_recipe(plan: Plan) -> list[Plan]:
    return [plan]


def no_plan() -> Recipe:
    return Recipe(SyncSchedule(5))


def no_dataclass(plan: Plan) -> Recipe:
    return Recipe(SyncSchedule(5), compressor=Nothing())  # type: ignore[arg-type]


def a_class_and_arguments(plan: Plan) -> Recipe:
    return Recipe(SyncSchedule(5), optimizer=partial(torch.optim.SGD, lr=0.25, momentum=0.5))


def a_function(plan: Plan) -> Recipe:
    return Recipe(SyncSchedule(5), optimizer=lambda params: torch.optim.SGD(params, lr=0.25))
