"""DCT momentum (arXiv 2510.03371), the variant whose anchors stay equal."""

from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.recipes.base import MUON, MUON_START, PLAIN_SGD, Plan, Recipe, warm_start


def dct_momentum(plan: Plan) -> Recipe:
    """The 256 largest cosine coefficients of every 64 x 64 tile of a decayed residual, then outer SGD; H = 128.

    e <- beta * e + g; q = top-k of DCT(e); e <- e - q; the outer optimizer gets mean(q). Only the shared mean
    reaches the anchor. The literal update (`shared_momentum`) lets anchors differ between workers.
    """
    local_steps = plan.local_steps or 128
    return Recipe(
        schedule=SyncSchedule(local_steps, warm_start_steps=warm_start(plan, MUON_START), warm_start_every=MUON_START),
        compressor=ErrorFeedback(DCT(TopK(keep=256, values=Quantize(bits=8, block=256))), decay=0.95),
        optimizer=PLAIN_SGD,
        inner=MUON,
    )
