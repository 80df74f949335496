"""How a mean is taken in few bytes."""

from isthmus.compress.base import Codec, Compressor, NotFinite
from isthmus.compress.cast import Cast
from isthmus.core.registry import Registry

COMPRESSORS = Registry(
    "compressor",
    {
        "cast": "isthmus.compress.cast:Cast",
        "quantize": "isthmus.compress.quantize:Quantize",
        "float4": "isthmus.compress.float4:Float4",
        "topk": "isthmus.compress.topk:TopK",
        "dct": "isthmus.compress.dct:DCT",
        "low_rank": "isthmus.compress.lowrank:LowRank",
        "error_feedback": "isthmus.compress.feedback:ErrorFeedback",
        "shared_momentum": "isthmus.compress.momentum:SharedMomentum",
        "median": "isthmus.compress.robust:Median",
        "trimmed_mean": "isthmus.compress.robust:TrimmedMean",
        "norm_clip": "isthmus.compress.robust:NormClip",
        "centred_clip": "isthmus.compress.robust:CentredClip",
    },
    methods=("average",),
)

# how the messages of all workers become one: of a codec's, a compressor that takes another mean of them
AGGREGATIONS = Registry(
    "aggregation",
    {
        "mean": "isthmus.compress.robust:weighted_mean",
        "median": "isthmus.compress.robust:Median",
        "trimmed_mean": "isthmus.compress.robust:TrimmedMean",
        "norm_clip": "isthmus.compress.robust:NormClip",
        "centred_clip": "isthmus.compress.robust:CentredClip",
    },
)

__all__ = ["AGGREGATIONS", "COMPRESSORS", "Cast", "Codec", "Compressor", "NotFinite"]
