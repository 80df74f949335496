"""Streaming DiLoCo (arXiv 2501.18512)."""

from isthmus.compress.float4 import Float4
from isthmus.core import SyncSchedule
from isthmus.outer import Mix
from isthmus.recipes.base import Plan, Recipe, adamw_start, outer_sgd


def streaming(plan: Plan) -> Recipe:
    """Algorithm 2 of arXiv 2501.18512: H = 100, strided fragments, tau = 1, E3M0 on the wire.

    Lines of the paper: "(t - t_p) mod H = 0" is `SyncSchedule.begins`, "(t - t_p - tau) mod H = 0" is `finishes`;
    "theta <- alpha * theta + (1 - alpha) * anchor" is `Mix`. At most 2 fragments here: small models have few blocks.
    alpha is 0, which the paper finds as good as its 0.5: where momentum runs ahead of the workers, the half of the
    local values that 0.5 keeps holds the anchor back (docs/log.md).
    """
    local_steps = plan.local_steps or 100
    fragments, start = 2 if local_steps % 2 == 0 else 1, adamw_start(plan, local_steps)
    return Recipe(
        schedule=SyncSchedule(local_steps, fragments, min(1, local_steps - 1), **start),
        compressor=Float4("E3M0"),
        optimizer=outer_sgd(plan, local_steps),
        merge=Mix(alpha=0.0),
        split="strided",
        gradient_compressor=Float4("E3M0") if plan.averages_gradients else None,
    )
