"""SparseLoCo (arXiv 2508.15706)."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.recipes.base import FAST_MUON, PLAIN_SGD, SPARSE_START, Plan, Recipe, share_to_send, warm_start

_CHUNK, _PART = 4096, 64


def sparseloco(plan: Plan) -> Recipe:
    """Algorithm 1 of arXiv 2508.15706: the largest of every 4096 values in 2 bits, residual decay 0.95, H = 30.

    The paper's 64 in long runs, up to 640 where there are fewer than 256 syncs, and more below seven.
    """
    local_steps = plan.local_steps or 30
    start = warm_start(plan, local_steps, SPARSE_START)
    share = share_to_send(plan, local_steps, start, crossings=4, least=1 / 64, most=4 / 25)
    keep = _PART * round(_CHUNK * share / _PART)
    return Recipe(
        schedule=SyncSchedule(local_steps, **start),
        compressor=ErrorFeedback(TopK(keep, _CHUNK, values=Quantize(bits=2, block=_PART, scale_bits=8)), decay=0.95),
        optimizer=PLAIN_SGD,
        inner=FAST_MUON,
    )
