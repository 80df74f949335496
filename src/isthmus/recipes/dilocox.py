"""DiLoCoX (arXiv 2506.21263); its adaptation of rank and H is an option, `window` of the low-rank compressor."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule
from isthmus.outer import Eager, KeepProgress
from isthmus.recipes.base import FAST_MUON, SPARSE_START, Plan, Recipe, outer_sgd, share_to_send, warm_start

_LONG_DELAY = 20  # inner steps


def dilocox(plan: Plan) -> Recipe:
    """A sync takes a whole round (H = 125); low-rank factors in 4 bits with error feedback (decay 0.8).

    The rank is a share of each matrix's smaller side: a quarter in short runs, a sixteenth in long ones. Muon's steps
    have no small singular values, so a rank that does not grow with the model would leave ever more behind.

    The paper's one-step delay (`Replace` with tau = H) discards what was learnt while a sync was under way. `Eager`
    repairs that best, with anchors of each worker's own; below H = 20, and where workers come and go, `KeepProgress`
    does (docs/learning.md). "Dual optimizer policy" needs no code: every rank owns inner and outer optimizer of what
    it holds.
    """
    local_steps = plan.local_steps or 125
    eager = local_steps >= _LONG_DELAY and not plan.elastic
    start = warm_start(plan, SPARSE_START)
    rank = round(share_to_send(plan, local_steps, start, crossings=11, least=1 / 16, most=1 / 4), 3)
    return Recipe(
        schedule=SyncSchedule(local_steps, 1, local_steps, start, SPARSE_START),
        compressor=ErrorFeedback(LowRank(rank, factors=Quantize(bits=4)), decay=0.8),
        optimizer=outer_sgd(plan, local_steps, short_run_momentum=0.3 if eager else 0.5),
        merge=Eager() if eager else KeepProgress(),
        inner=FAST_MUON,
    )
