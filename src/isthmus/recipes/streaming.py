"""Streaming DiLoCo (arXiv 2501.18512)."""

from isthmus.compress.float4 import Float4
from isthmus.core import SyncSchedule
from isthmus.outer import Mix
from isthmus.recipes.base import Plan, Recipe, outer_sgd


def streaming(plan: Plan) -> Recipe:
    """Algorithm 2 of arXiv 2501.18512: H = 100, strided fragments, tau = 1, alpha = 0.5, E3M0 on the wire.

    Lines of the paper: "(t - t_p) mod H = 0" is `SyncSchedule.begins`, "(t - t_p - tau) mod H = 0" is `finishes`;
    "theta <- alpha * theta + (1 - alpha) * anchor" is `Mix`. At most 2 fragments here: small models have few blocks.
    """
    local_steps = plan.local_steps or 100
    fragments = 2 if local_steps % 2 == 0 else 1
    return Recipe(
        schedule=SyncSchedule(local_steps, num_fragments=fragments, overlap_steps=1),
        compressor=Float4("E3M0"),
        optimizer=outer_sgd(plan),
        merge=Mix(alpha=0.5),
        split="strided",
    )
