"""Eager Updates (arXiv 2502.12996)."""

from isthmus.compress.float4 import Float4
from isthmus.core import SyncSchedule
from isthmus.outer import KeepProgress
from isthmus.recipes.base import KEPT, MUON, MUON_START, Plan, Recipe, delay, muon_start_lr, outer_sgd, warm_start


def eager(plan: Plan) -> Recipe:
    """One-outer-step overlap of arXiv 2502.12996: H = 30, a sync takes a whole round (tau = H), E3M0 on the wire.

    The paper swaps a worker's stale share of the mean for its fresh one, "Delta(t-1) mean + (1/M) (own Delta(t) - own
    Delta(t-1))": `Eager.outer_gradient`. That sends again what is on its way, and leaves every worker an anchor of its
    own. Here workers keep half of their fresh progress themselves, none of it is sent twice, and anchors stay equal: it
    learns more at every H (docs/learning.md). Where few syncs come they are shorter than a round (`delay`). The paper's
    merge is `outer.merge.type=eager`.
    """
    local_steps = plan.local_steps or 30
    start = warm_start(plan, local_steps, MUON_START)
    return Recipe(
        schedule=SyncSchedule(
            local_steps,
            overlap_steps=delay(plan, local_steps, start),
            **start,
            warm_start_lr=muon_start_lr(plan),
        ),
        compressor=Float4("E3M0"),
        optimizer=outer_sgd(plan, local_steps, "muon"),
        merge=KeepProgress(KEPT),
        inner=MUON,
    )
