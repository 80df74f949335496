"""MuLoCo (arXiv 2505.23725)."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule
from isthmus.recipes.base import Plan, Recipe, outer_sgd


def muloco(plan: Plan) -> Recipe:
    """Muon inside; 2-bit pseudo-gradients with error feedback; outer Nesterov with momentum 0.6; H = 30."""
    return Recipe(
        schedule=SyncSchedule(plan.local_steps or 30),
        compressor=ErrorFeedback(Quantize(bits=2)),
        optimizer=outer_sgd(plan, momentum=0.6),
        inner={"optimizer": {"type": "muon"}},
    )
