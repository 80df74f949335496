"""MuLoCo (arXiv 2505.23725)."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule
from isthmus.recipes.base import MUON, MUON_OUTER, Plan, Recipe, warm_start


def muloco(plan: Plan) -> Recipe:
    """Muon inside; 2-bit pseudo-gradients with error feedback; outer Nesterov 0.7 / 0.6; H = 30."""
    return Recipe(
        schedule=SyncSchedule(plan.local_steps or 30, warm_start_steps=warm_start(plan)),
        compressor=ErrorFeedback(Quantize(bits=2)),
        optimizer=MUON_OUTER,
        inner=MUON,
    )
