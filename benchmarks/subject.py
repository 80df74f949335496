"""The model that is measured, and on what: GPT-NeoX of 405M parameters in bf16 on a GPU, a small one on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from isthmus.models.gpt_neox import GPTNeoX
from isthmus.train.assemble import choose_device

DEVICE = choose_device()
ON_GPU = DEVICE.type == "cuda"
SPEC = (
    GPTNeoX(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=50_304, sequence_length=1024)
    if ON_GPU
    else GPTNeoX(hidden_size=256, num_layers=4, num_heads=4, vocab_size=2048, sequence_length=64)
)
BATCH_SIZE = 16 if ON_GPU else 4
PRECISION = "bfloat16" if ON_GPU else "float32"


def build_model() -> nn.Module:
    """On its device, with float32 weights."""
    return SPEC.build().to(DEVICE)


def batch() -> dict[str, torch.Tensor]:
    """Random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SPEC.vocab_size, (BATCH_SIZE, SPEC.sequence_length + 1), generator=generator)
    return {"tokens": tokens.to(DEVICE)}


def describe() -> str:
    """What was measured, for a note below a table."""
    count = sum(param.numel() for param in SPEC.build().parameters())
    where = torch.cuda.get_device_name(DEVICE) if ON_GPU else "a CPU, NOT on a GPU: a small model by the same code"
    tokens = f"{BATCH_SIZE} x {SPEC.sequence_length} tokens a step"
    return f"GPT-NeoX of {count:,} parameters, {PRECISION} forward, {tokens}, on {where}"
