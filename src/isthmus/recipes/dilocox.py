"""DiLoCoX (arXiv 2506.21263); its adaptation of rank and H is an option, `window` of the low-rank compressor."""

from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.lowrank import LowRank
from isthmus.compress.quantize import Quantize
from isthmus.core import SyncSchedule
from isthmus.outer import Eager, KeepProgress
from isthmus.recipes.base import FAST_MUON, Plan, Recipe, outer_sgd, warm_start

_LONG_DELAY = 20  # inner steps


def dilocox(plan: Plan) -> Recipe:
    """A sync takes a whole round (H = 125); low-rank factors in 4 bits with error feedback.

    The paper's one-step delay (`Replace` with tau = H) discards what was learnt while a sync was under way. `Eager`
    repairs that best, with anchors of each worker's own; below H = 20, and where workers come and go, `KeepProgress`
    does (docs/learning.md). "Dual optimizer policy" needs no code: every rank owns inner and outer optimizer of what
    it holds.
    """
    local_steps = plan.local_steps or 125
    eager = local_steps >= _LONG_DELAY and not plan.elastic
    return Recipe(
        schedule=SyncSchedule(local_steps, overlap_steps=local_steps, warm_start_steps=warm_start(plan)),
        compressor=ErrorFeedback(LowRank(rank=32, factors=Quantize(bits=4))),
        optimizer=outer_sgd(plan, local_steps, short_run_momentum=0.3 if eager else 0.5),
        merge=Eager() if eager else KeepProgress(),
        inner=FAST_MUON,
    )
