"""DiLoCo (arXiv 2311.08105)."""

from isthmus.compress import Cast
from isthmus.core import SyncSchedule
from isthmus.recipes.base import Plan, Recipe, adamw_start, outer_sgd


def diloco(plan: Plan) -> Recipe:
    """Algorithm 1 of arXiv 2311.08105: H = 500, outer Nesterov, float32, after a synchronous start.

    Lines of the paper: the inner loop is `inner_step`; "outer gradient" is the mean that `Cast` takes of
    anchor - params; "outer optimization" is `OuterStep.take`; "all workers adopt" is `Replace`. The paper
    starts from 24,000 steps of ordinary training; `warm_start_steps` stand for them.
    """
    local_steps = plan.local_steps or 500
    return Recipe(
        schedule=SyncSchedule(local_steps, **adamw_start(plan, local_steps)),
        optimizer=outer_sgd(plan, local_steps),
        gradient_compressor=Cast() if plan.averages_gradients else None,
    )
