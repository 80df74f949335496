"""OpenDiLoCo (arXiv 2407.07852)."""

from dataclasses import replace

from isthmus.compress import Cast
from isthmus.recipes.base import Plan, Recipe
from isthmus.recipes.diloco import diloco


def opendiloco(plan: Plan) -> Recipe:
    """DiLoCo with fp16 on the wire; sums stay float32 (arXiv 2407.07852, section 3).

    The gradients of the start are bfloat16: those of large models are too small for fp16.
    """
    gradients = Cast("bfloat16") if plan.averages_gradients else None
    return replace(diloco(plan), compressor=Cast("float16"), gradient_compressor=gradients)
