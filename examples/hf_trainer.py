"""The Hugging Face `Trainer` with an outer loop as a callback: each worker is a Trainer of its own.

    torchrun --nproc-per-node 2 examples/hf_trainer.py FOLDER

Started again with the same folder, the workers go on from the newest checkpoint there.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

from isthmus.hugging_face import OuterLoopCallback

STEPS, LENGTH = 60, 32


class Windows(Dataset):
    """Windows of this file's own bytes; every worker draws them in an order of its own."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        """One window from every byte on."""
        return len(self.text) - LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Tokens [LENGTH], also as labels: the model shifts them itself."""
        window = self.text[index : index + LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train a tiny GPT-NeoX."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all workers start from the same weights
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=256
    )
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        save_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    callback = OuterLoopCallback("diloco", local_steps=10)
    trainer = Trainer(GPTNeoXForCausalLM(config), arguments, train_dataset=Windows(), callbacks=[callback])
    worker = Path(arguments.output_dir)  # by now worker-0, worker-1 ... in the folder
    trainer.train(resume_from_checkpoint=any(worker.glob("checkpoint-*")))
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{worker.name} loss {losses[0]} -> {losses[-1]}", flush=True)
    print(f"{worker.name} anchor {callback.outer_loop.anchor_hash()}", flush=True)


if __name__ == "__main__":
    main()
