"""The inner step: ordinary training of one worker, as it would be without the others."""

from isthmus.core.registry import Registry
from isthmus.inner.adversarial import Adversarial, AdversarialStep
from isthmus.inner.lr_schedule import WSD, Constant, Cosine, LRSchedule
from isthmus.inner.optimizers import AdamW, MuonAdamW
from isthmus.inner.step import Batch, InnerStep, Metrics
from isthmus.inner.supervised import SupervisedStep

INNER_OPTIMIZERS = Registry(
    "inner optimizer",
    {
        "adamw": "isthmus.inner.optimizers:AdamW",
        "muon": "isthmus.inner.optimizers:MuonAdamW",
        "adversarial": "isthmus.inner.adversarial:Adversarial",
    },
)

LR_SCHEDULES = Registry(
    "learning-rate schedule",
    {
        "constant": "isthmus.inner.lr_schedule:Constant",
        "cosine": "isthmus.inner.lr_schedule:Cosine",
        "wsd": "isthmus.inner.lr_schedule:WSD",
    },
)

__all__ = [
    "INNER_OPTIMIZERS",
    "LR_SCHEDULES",
    "WSD",
    "AdamW",
    "Adversarial",
    "AdversarialStep",
    "Batch",
    "Constant",
    "Cosine",
    "InnerStep",
    "LRSchedule",
    "Metrics",
    "MuonAdamW",
    "SupervisedStep",
]
