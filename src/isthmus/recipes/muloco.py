"""MuLoCo (arXiv 2505.23725)."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.core import SyncSchedule
from isthmus.recipes.base import MUON, MUON_START, TWO_BITS, Plan, Recipe, muon_start_lr, outer_sgd, warm_start


def muloco(plan: Plan) -> Recipe:
    """Muon inside; 2-bit pseudo-gradients with error feedback; outer Nesterov; H = 30.

    The scales of 2 bits are per 32 values, in a byte: 2.25 bits a value. With 128 values to a scale of 16 bits (2.125
    bits) it learns less (docs/log.md).
    """
    local_steps = plan.local_steps or 30
    start = warm_start(plan, local_steps, MUON_START)
    return Recipe(
        schedule=SyncSchedule(local_steps, **start, warm_start_lr=muon_start_lr(plan)),
        compressor=ErrorFeedback(TWO_BITS),
        optimizer=outer_sgd(plan, local_steps, "muon"),
        inner=MUON,
    )
