"""DiLoCo (arXiv 2311.08105)."""

from isthmus.core import SyncSchedule
from isthmus.recipes.base import Plan, Recipe, outer_sgd


def diloco(plan: Plan) -> Recipe:
    """Algorithm 1 of arXiv 2311.08105: H = 500, outer Nesterov with momentum 0.9, float32.

    Lines of the paper: the inner loop is `inner_step`; "outer gradient" is the mean that `Cast` takes of
    anchor - params; "outer optimization" is `OuterLoop._outer_step`; "all workers adopt" is `Replace`.
    """
    return Recipe(schedule=SyncSchedule(plan.local_steps or 500), optimizer=outer_sgd(plan))
