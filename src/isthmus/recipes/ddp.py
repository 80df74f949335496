"""The baseline: every step averages gradients."""

from isthmus.recipes.base import Plan, Recipe


def ddp(plan: Plan) -> Recipe:
    """Synchronous data parallelism by torch's own `DistributedDataParallel`, in float32. No outer loop."""
    return Recipe(schedule=None)
