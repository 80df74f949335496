"""The Hugging Face `Trainer` with an outer loop as a callback: each worker is a Trainer of its own.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer would turn torchrun's world into data parallelism of its own. So the worker meets its peers first and then
hides them from it: the Trainer sees one process.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

from isthmus.outer import OuterLoopCallback
from isthmus.recipes import attach

STEPS, LENGTH = 60, 32


class Windows(Dataset):
    """Random windows of this file's own bytes; every worker draws others."""

    def __init__(self, worker: int) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.starts = torch.Generator().manual_seed(worker)

    def __len__(self) -> int:
        """As many windows as the run needs."""
        return 8 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Tokens [LENGTH], also as labels: the model shifts them itself."""
        start = int(torch.randint(0, len(self.text) - LENGTH, (1,), generator=self.starts))
        window = self.text[start : start + LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train a tiny GPT-NeoX."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=256
    )
    callback = OuterLoopCallback(lambda model: attach("diloco", model, steps=STEPS, local_steps=10))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(GPTNeoXForCausalLM(config), arguments, train_dataset=Windows(dist.get_rank()))
        trainer.add_callback(callback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"worker {dist.get_rank()} loss {losses[0]} -> {losses[-1]}", flush=True)
    print(f"worker {dist.get_rank()} anchor {callback.outer_loop.anchor_hash()}", flush=True)


if __name__ == "__main__":
    main()
