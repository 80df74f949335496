"""SparseLoCo (arXiv 2508.15706)."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.recipes.base import FAST_MUON, Plan, Recipe, warm_start


def sparseloco(plan: Plan) -> Recipe:
    """Algorithm 1 of arXiv 2508.15706: 64 of every 4096 values in 2 bits, residual decay 0.95, H = 30.

    The outer optimizer is SGD with learning rate 1 and no momentum: the decayed residual plays that part. The warm
    start is half as long again as the other recipes' and syncs every second step: sparse messages need time to gather,
    so more steps help where more syncs do not (docs/learning.md).
    """
    warm_start_steps = 3 * warm_start(plan) // 4 * 2
    return Recipe(
        schedule=SyncSchedule(plan.local_steps or 30, warm_start_steps=warm_start_steps, warm_start_every=2),
        compressor=ErrorFeedback(TopK(keep=64, chunk=4096, values=Quantize(bits=2, block=64, scale_bits=8)), 0.95),
        optimizer={"type": "sgd", "lr": 1.0},
        inner=FAST_MUON,
    )
