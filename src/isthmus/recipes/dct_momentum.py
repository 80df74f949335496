"""DCT momentum (arXiv 2510.03371), the variant whose anchors stay equal."""

import math

from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.recipes.base import FAST_MUON, MUON_START, PLAIN_SGD, Plan, Recipe, share_to_send, warm_start

_TILE, _BLOCK = 4096, 256


def dct_momentum(plan: Plan) -> Recipe:
    """The 256 largest cosine coefficients of every 64 x 64 tile of a decayed residual, then outer SGD; H = 128.

    Up to half where there are fewer than 64 syncs, so that each crosses four times while there are at least eight.

    e <- beta * e + g; q = top-k of DCT(e); e <- e - q; the outer optimizer gets mean(q). Only the shared mean
    reaches the anchor. The literal update (`shared_momentum`) lets anchors differ between workers.
    """
    local_steps = plan.local_steps or 128
    start = warm_start(plan, local_steps, MUON_START)
    share = share_to_send(plan, local_steps, start, crossings=4, least=1 / 16, most=1 / 2)
    keep = _BLOCK * math.ceil(_TILE * share / _BLOCK)
    return Recipe(
        schedule=SyncSchedule(local_steps, **start),
        compressor=ErrorFeedback(DCT(TopK(keep, values=Quantize(bits=8, block=_BLOCK))), decay=0.95),
        optimizer=PLAIN_SGD,
        inner=FAST_MUON,
    )
