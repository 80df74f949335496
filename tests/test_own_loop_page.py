"""The samples of docs/own-loop.md run as they stand there, on two workers, with shorter runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from isthmus import attach
from isthmus.transport.torchft.lighthouse import lighthouse
from tests import workers
from tests.hugging_face_loops import Tokens, tiny_model

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[1] / "docs/own-loop.md"
HEADINGS = ["", "Another method, other peers", "A start that averages gradients", "Save and resume"]
HEADINGS += ["The Hugging Face Trainer", "accelerate", "LoRA", "Workers that come and go"]


def samples() -> dict[str, str]:
    """The code under every heading."""
    code, heading = {}, ""
    for line, block in re.findall(r"^## ([^\n]*)$|^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        heading = line or heading
        if block:
            code[heading] = code.get(heading, "") + block
    return code


def test_the_samples_of_the_page_run(tmp_path: Path) -> None:
    with lighthouse("127.0.0.1:0", grace_seconds=5) as port:
        ended = workers.run(run_samples, folder=str(tmp_path), lighthouse=f"127.0.0.1:{port}")
    one, other = workers.results(ended)
    assert one == other
    assert list(one) == ["program", "trainer", "elastic"]


def run_samples(rank: int, folder: str, lighthouse: str) -> dict[str, str]:
    """Run every sample; what the workers must have alike at the end of those that train."""
    code, hashes = samples(), {}
    assert list(code) == HEADINGS
    names: dict[str, Any] = {}

    exec(code[""], names)
    hashes["program"] = names["outer_loop"].anchor_hash()

    exec(code["Another method, other peers"], names)
    names["outer_loop"].close()

    exec(code["A start that averages gradients"], names)
    assert not names["outer_loop"].averages_gradients  # the start is over
    names["outer_loop"].finish()
    names["outer_loop"].close()

    exec(code["Save and resume"], names)
    names["outer_loop"] = attach("streaming", names["model"], steps=200, local_steps=20)
    names["save"](f"{folder}/{rank}.pt", 0)
    names["outer_loop"].close()
    outer_loop, step = names["resume"](f"{folder}/{rank}.pt")
    outer_loop.close()
    assert step == outer_loop.state.inner_steps == 0

    names["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=2)
    names["model"] = model = tiny_model()
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names["batches"] = DataLoader(Tokens(), batch_size=4)
    exec(code["accelerate"], names)
    assert names["outer_loop"].state.inner_steps == 3  # 48 samples on two workers, in two batches of 4 each
    names["outer_loop"].close()

    names["model"] = tiny_model()
    exec(code["LoRA"], names)
    names["outer_loop"].close()

    names |= {"model": tiny_model(), "dataset": Tokens()}
    exec(code["The Hugging Face Trainer"].replace("runs/mine", folder).replace("=1000", "=4"), names)
    hashes["trainer"] = names["trainer"].callback_handler.callbacks[-2].outer_loop.anchor_hash()

    os.environ.pop("WORLD_SIZE")
    names |= {"model": tiny_model(), "inner_step": lambda batch: None, "batches": iter(range(100))}
    elastic = code["Workers that come and go"].replace("HOST:PORT", lighthouse).replace("=4", "=2")
    exec(re.sub(r"\b1000\b", "8", elastic), names)
    hashes["elastic"] = names["outer_loop"].anchor_hash()
    return hashes
