"""OpenDiLoCo (arXiv 2407.07852)."""

from isthmus.compress import Cast
from isthmus.core import SyncSchedule
from isthmus.recipes.base import Plan, Recipe, outer_sgd


def opendiloco(plan: Plan) -> Recipe:
    """DiLoCo with fp16 on the wire, H = 500; sums stay float32 (arXiv 2407.07852, section 3)."""
    return Recipe(schedule=SyncSchedule(plan.local_steps or 500), compressor=Cast("float16"), optimizer=outer_sgd(plan))
