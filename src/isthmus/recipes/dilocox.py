"""DiLoCoX (arXiv 2506.21263); its adaptation of rank and H is an option, `window` of the low-rank compressor."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.core import SyncSchedule
from isthmus.outer import KeepProgress
from isthmus.recipes.base import (
    FAST_MUON,
    KEPT,
    PLAIN_SGD,
    SPARSE_START,
    TWO_BITS,
    Plan,
    Recipe,
    delay,
    share_to_send,
    warm_start,
)

_ALMOST_ALL = 0.999  # of the directions: a share below 1


def dilocox(plan: Plan) -> Recipe:
    """A sync takes a whole round (H = 125); low-rank factors in 2 bits with error feedback (decay 0.8).

    The rank is a share of each matrix's smaller side, the smaller the more syncs there are, at least an eighth. Muon's
    steps have no small singular values, so a rank that does not grow with the model would leave ever more behind, and
    twice as many directions in 2 bits are worth more than the paper's 4 bits. A matrix whose factors would be no
    smaller than itself crosses whole, in 2 bits, too (docs/log.md).

    The paper's one-step delay (`Replace` with tau = H) discards what was learnt while a sync was under way; half of it
    is kept here, and where few syncs come they are shorter than a round (`delay`). "Dual optimizer policy" needs no
    code: every rank owns inner and outer optimizer of what it holds.
    """
    local_steps = plan.local_steps or 125
    start = warm_start(plan, local_steps, SPARSE_START)
    share = share_to_send(plan, local_steps, start, crossings=24, least=1 / 8, most=1.0)
    rank = round(min(_ALMOST_ALL, share), 3)
    return Recipe(
        schedule=SyncSchedule(local_steps, overlap_steps=delay(plan, local_steps, start), **start),
        compressor=ErrorFeedback(LowRank(rank, factors=TWO_BITS, bypass=TWO_BITS), decay=0.8),
        optimizer=PLAIN_SGD,
        merge=KeepProgress(KEPT),
        inner=FAST_MUON,
    )
