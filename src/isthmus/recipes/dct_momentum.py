"""DCT momentum (arXiv 2510.03371), the variant whose anchors stay equal."""

from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.recipes.base import Plan, Recipe, outer_sgd


def dct_momentum(plan: Plan) -> Recipe:
    """The largest cosine coefficients of a decayed residual, then outer Nesterov; H = 128.

    e <- beta * e + g; q = top-k of DCT(e); e <- e - q; the outer optimizer gets mean(q). Only the shared mean
    reaches the anchor. The literal update (`shared_momentum`) lets anchors differ between workers.
    """
    return Recipe(
        schedule=SyncSchedule(plan.local_steps or 128),
        compressor=ErrorFeedback(DCT(TopK()), decay=0.95),
        optimizer=outer_sgd(plan),
    )
