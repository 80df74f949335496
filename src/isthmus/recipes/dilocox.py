"""DiLoCoX (arXiv 2506.21263); its adaptation of rank and H is an option, `window` of the low-rank compressor."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule
from isthmus.outer import KeepProgress
from isthmus.recipes.base import FAST_MUON, KEPT, PLAIN_SGD, SPARSE_START, Plan, Recipe, share_to_send, warm_start


def dilocox(plan: Plan) -> Recipe:
    """A sync takes a whole round (H = 125); low-rank factors in 4 bits with error feedback (decay 0.8).

    The rank is a share of each matrix's smaller side: a quarter in short runs, a sixteenth in long ones. Muon's steps
    have no small singular values, so a rank that does not grow with the model would leave ever more behind.

    The paper's one-step delay (`Replace` with tau = H) discards what was learnt while a sync was under way; half of it
    is kept here (docs/learning.md). "Dual optimizer policy" needs no code: every rank owns inner and outer optimizer of
    what it holds.
    """
    local_steps = plan.local_steps or 125
    start = warm_start(plan, SPARSE_START)
    rank = round(share_to_send(plan, local_steps, start, crossings=12, least=1 / 16, most=1 / 4), 3)
    return Recipe(
        schedule=SyncSchedule(local_steps, 1, local_steps, start, SPARSE_START),
        compressor=ErrorFeedback(LowRank(rank, factors=Quantize(bits=4)), decay=0.8),
        optimizer=PLAIN_SGD,
        merge=KeepProgress(KEPT),
        inner=FAST_MUON,
    )
