"""The model that is measured, and on what: GPT-NeoX of 405M parameters in bf16 on a GPU, a small one on a CPU.

All sizes of `benchmarks.gpu` stand here, too, those of a GPU beside those of a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isthmus.models.gpt_neox import GPTNeoX

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SPEC = (
    GPTNeoX(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=50_304, sequence_length=1024)
    if ON_GPU
    else GPTNeoX(hidden_size=256, num_layers=4, num_heads=4, vocab_size=2048, sequence_length=64)
)
BATCH_SIZE = 16 if ON_GPU else 4
PRECISION = "bfloat16" if ON_GPU else "float32"

ROUNDS = 20 if ON_GPU else 2  # of codecs
IN_FLIGHT_STEPS, SYNCS = (10, 5) if ON_GPU else (4, 1)  # steps with a sync, and of as many again without one
TEST_FILES = "test_*.py" if ON_GPU else "test_offload.py"
START_STEPS = 120 if ON_GPU else 12
START: dict[str, Any] = {
    "model": {"type": "gpt_neox", "size": "pythia-160m", "sequence_length": 1024}
    if ON_GPU
    else {"type": "gpt_neox", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "sequence_length": 32},
    "inner": {"batch_size": 8, "precision": PRECISION},
}
SIZES = (  # of inner steps at 2,048 tokens, by what they are called; the most important first
    {
        name: [f"model={{type: gpt_neox, size: pythia-{name}}}", f"inner.batch_size={size}", "train.steps=1000"]
        for name, size in (("410m", 16), ("1.4b", 8), ("160m", 16))
    }
    if ON_GPU
    else {
        "small": [
            "model={type: gpt_neox, hidden_size: 64, num_layers: 2, num_heads: 2, sequence_length: 64}",
            "inner.batch_size=2",
            "train.steps=1000",
        ]
    }
)
SIZES_WITH_A_GOAL = ("410m", "1.4b", "small")
COMPILED = (False, True) if ON_GPU else (False,)
LEARNING_WORKERS, LEARNING_LOCAL_STEPS = (4, 15) if ON_GPU else (2, 2)
LEARNING_RECIPES = ("ddp", "diloco", "muloco", "streaming") if ON_GPU else ("ddp", "streaming")
LEARNING = (
    [
        "model={type: gpt_neox, hidden_size: 512, num_layers: 8, num_heads: 8, vocab_size: 256, sequence_length: 256}",
        "inner.batch_size=16",
        "train={steps: 120, eval_every: 30, eval_batches: 8}",
    ]
    if ON_GPU
    else [
        "model={type: gpt_neox, hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 256, sequence_length: 32}",
        "inner.batch_size=2",
        "train={steps: 6, eval_every: 3, eval_batches: 2}",
    ]
)


def build_model() -> nn.Module:
    """On its device, with float32 weights."""
    return SPEC.build().to(DEVICE)


def batch() -> dict[str, torch.Tensor]:
    """Random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SPEC.vocab_size, (BATCH_SIZE, SPEC.sequence_length + 1), generator=generator)
    return {"tokens": tokens.to(DEVICE)}


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has done what this thread gives it, not what a sync does beside it."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def wait() -> None:
    """Wait for what this thread has given the device."""
    if ON_GPU:
        torch.cuda.current_stream().synchronize()


def describe() -> str:
    """What was measured, for a note below a table."""
    count = sum(param.numel() for param in SPEC.build().parameters())
    where = torch.cuda.get_device_name(DEVICE) if ON_GPU else "a CPU, NOT on a GPU: a small model by the same code"
    tokens = f"{BATCH_SIZE} x {SPEC.sequence_length} tokens a step"
    return f"GPT-NeoX of {count:,} parameters, {PRECISION} forward, {tokens}, on {where}"
