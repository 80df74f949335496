"""The methods with the settings of their papers, letter by letter, where the recipes of the same names differ.

    outer: {recipe: diloco_paper}

None of them has a synchronous start, and all but `muloco` have AdamW inside. The papers' runs are long (hundreds of
outer steps) and begin from trained weights or with tens of thousands of sequences a step; docs/learning.md says what
the start is worth in shorter ones. What could not be read in a paper is named where it stands.
"""

from isthmus.compress import Cast, Compressor
from isthmus.compress.dct import DCT
from isthmus.compress.feedback import ErrorFeedback
from isthmus.compress.float4 import Float4
from isthmus.compress.lowrank import LowRank
from isthmus.compress.momentum import SharedMomentum
from isthmus.compress.quantize import Quantize
from isthmus.compress.topk import TopK
from isthmus.core import SyncSchedule
from isthmus.outer import Eager, Mix
from isthmus.recipes.base import Plan, Recipe
from isthmus.spec import Spec


def diloco(plan: Plan) -> Recipe:
    """DiLoCo (arXiv 2311.08105, section 3 and table 2): H = 500, outer Nesterov 0.7 / 0.9, float32."""
    return _synchronous(plan, 500, Cast(), _nesterov(0.7, 0.9))


def opendiloco(plan: Plan) -> Recipe:
    """OpenDiLoCo (arXiv 2407.07852): DiLoCo with float16 on the wire."""
    return _synchronous(plan, 500, Cast("float16"), _nesterov(0.7, 0.9))


def streaming(plan: Plan) -> Recipe:
    """Streaming DiLoCo (arXiv 2501.18512): H = 100, tau = 1, alpha = 0.5, outer Nesterov 0.4 / 0.9, E3M0.

    The paper's fragments have three blocks each; here there are two fragments, as in the recipe.
    """
    local_steps = plan.local_steps or 100
    fragments = 2 if local_steps % 2 == 0 else 1
    return Recipe(
        schedule=SyncSchedule(local_steps, fragments, overlap_steps=min(1, local_steps - 1)),
        compressor=Float4("E3M0"),
        optimizer=_nesterov(0.4, 0.9),
        merge=Mix(alpha=0.5),
        split="strided",
    )


def eager(plan: Plan) -> Recipe:
    """Eager Updates (arXiv 2502.12996): H = 30, tau = H, outer Nesterov 0.4 / 0.9, E3M0."""
    local_steps = plan.local_steps or 30
    return Recipe(
        schedule=SyncSchedule(local_steps, overlap_steps=local_steps),
        compressor=Float4("E3M0"),
        optimizer=_nesterov(0.4, 0.9),
        merge=Eager(),
    )


def dilocox(plan: Plan) -> Recipe:
    """DiLoCoX (arXiv 2506.21263): H = 125, a round of plain delay, low-rank factors in 4 bits, error feedback.

    Reconstructed: the rank (32) and the outer optimizer (Nesterov 0.7 / 0.9) could not be read.
    """
    local_steps = plan.local_steps or 125
    return Recipe(
        schedule=SyncSchedule(local_steps, overlap_steps=local_steps),
        compressor=ErrorFeedback(LowRank(rank=32, factors=Quantize(bits=4))),
        optimizer=_nesterov(0.7, 0.9),
    )


def dct_momentum(plan: Plan) -> Recipe:
    """DCT momentum (arXiv 2510.03371) as in its authors' repository: 32 coefficients of a tile, decay 0.95, SGD 0.7.

    Anchors differ between workers, so this is for worlds in which nobody comes or goes.
    """
    compressor = SharedMomentum(DCT(TopK(keep=32, chunk=4096, values=Quantize(bits=8, block=32))), decay=0.95)
    return _synchronous(plan, 128, compressor, {"type": "sgd", "lr": 0.7})


def sparseloco(plan: Plan) -> Recipe:
    """SparseLoCo (arXiv 2508.15706, algorithm 1): H = 30, 64 of 4096 values in 2 bits, decay 0.95, outer SGD 1."""
    compressor = ErrorFeedback(TopK(keep=64, chunk=4096, values=Quantize(bits=2, block=64, scale_bits=8)), 0.95)
    return _synchronous(plan, 30, compressor, {"type": "sgd", "lr": 1.0})


def muloco(plan: Plan) -> Recipe:
    """MuLoCo (arXiv 2505.23725): Muon 0.02 inside, H = 30, 2 bits with error feedback, outer Nesterov 0.7 / 0.6."""
    compressor = ErrorFeedback(Quantize(bits=2, block=128))
    inner = {"optimizer": {"type": "muon", "lr": 0.02}}
    return _synchronous(plan, 30, compressor, _nesterov(0.7, 0.6), inner)


def _synchronous(
    plan: Plan, local_steps: int, compressor: Compressor, optimizer: Spec, inner: Spec | None = None
) -> Recipe:
    schedule = SyncSchedule(plan.local_steps or local_steps)
    return Recipe(schedule=schedule, compressor=compressor, optimizer=optimizer, inner=inner or {})


def _nesterov(lr: float, momentum: float) -> Spec:
    return {"type": "sgd", "lr": lr, "momentum": momentum, "nesterov": True}
