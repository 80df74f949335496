"""Training by the tools of Hugging Face, as their users write it; each worker is a process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainerCallback, TrainingArguments

from isthmus import attach
from isthmus.core import UserError
from isthmus.hugging_face import OuterLoopCallback
from isthmus.inner import MuonAdamW
from isthmus.outer import fingerprint

STEPS, SAVE_STEPS, DIES_AT = 14, 5, 8
TINY = GPTNeoXConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_size=64,
    hidden_dropout=0.1,
)


def tiny_model(lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(TINY)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model  # takes a second to import

    return get_peft_model(model, LoraConfig(r=2, target_modules=["query_key_value"]))


class Tokens(Dataset):
    """Counting, from one number or another on."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 8) % 64
        return {"input_ids": tokens, "labels": tokens}


class Death(TrainerCallback):
    """Kills the process at a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == DIES_AT:
            (Path(args.output_dir) / "dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Patience(TrainerCallback):
    """Waits before a sync until the worker that was killed is about to be there again, and takes its time then."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        while state.global_step == STEPS - 4 and not self.mark.exists():
            time.sleep(0.05)
        if state.global_step >= STEPS - 4:
            time.sleep(0.5)


def make_trainer(folder: str, callbacks: list[Any], lora: bool = False, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    return Trainer(tiny_model(lora), arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)


def make_callback(**more: Any) -> OuterLoopCallback:
    """Syncs that are under way when a checkpoint is saved: sent at 4, due at 7, saved at 5."""
    return OuterLoopCallback("streaming", local_steps=4, num_fragments=1, overlap_steps=3, warm_start_steps=0, **more)


def train(rank: int, folder: str, dies: bool = False, resumes: bool = False, lora: bool = False) -> dict[str, Any]:
    """Train by the Trainer; what two equal runs have alike, and what must differ between workers."""
    callback = make_callback()
    trainer = make_trainer(folder, [callback, *([Death()] if dies else [])], lora)
    trainer.train(resume_from_checkpoint=resumes)
    assert not isinstance(trainer.model_wrapped, DistributedDataParallel)
    worker, loop = Path(trainer.args.output_dir), callback.outer_loop
    assert worker.name == f"worker-{rank}"
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    return {
        "parameters": fingerprint(trainer.model.parameters()).hex(),
        "anchors": loop.anchor_hash(),
        "inner steps": loop.state.inner_steps,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "sent bytes": [report.sent_bytes for report in callback.reports],
        "saved": {path.parent.name: tensors_in(path) for path in sorted(worker.glob(f"checkpoint-*/{weights}"))},
        "trainable": sum(param.numel() for param in trainer.model.parameters() if param.requires_grad),
    }


class StartOfRun(TrainerCallback):
    """Keeps the fingerprint of the parameters and the norm of the gradients before the first sync of weights."""

    def __init__(self) -> None:
        self.parameters, self.norms = "", list[float]()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        gradients = [param.grad for param in others["model"].parameters() if param.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 3:
            self.parameters = fingerprint(others["model"].parameters()).hex()


def train_averaging_gradients(rank: int, folder: str) -> dict[str, Any]:
    """Train with a start of seven steps and one sync of weights, with gradients averaged and without."""

    def run(name: str, fp16: bool = False, **more: Any) -> dict[str, Any]:
        callback, start = OuterLoopCallback("diloco", local_steps=7, warm_start_every=7, **more), StartOfRun()
        trainer = make_trainer(f"{folder}/{name}", [callback, start], save_only_model=True)
        trainer.args.fp16 = fp16  # said to the callback alone: there is none on a CPU
        trainer.train()
        reports = [(report.fragment, report.committed) for report in callback.reports]
        return {"parameters": start.parameters, "norms": start.norms, "reports": reports}

    own = {"averages_gradients": False}
    return {"averaged": run("averaged"), "own": run("own", **own), "fp16": run("fp16", fp16=True)}


def train_with(rank: int, folder: str) -> dict[str, Any]:
    """Train with the Trainer's own optimizer, and with one that holds a Muon: how often each start syncs."""
    found = {}
    for name in ("usual", "muon"):
        callback = OuterLoopCallback("muloco", local_steps=8)
        trainer = make_trainer(f"{folder}/{name}", [callback], save_only_model=True)
        if name == "muon":
            trainer.optimizer = MuonAdamW().build(trainer.model)
        trainer.train()
        found[name] = callback.outer_loop.state.schedule.planned.warm_start_every
    return found


def train_elastically(rank: int, folder: str, lighthouse: str) -> dict[str, Any]:
    """Process 1 is killed and process 2 comes in its place, as the same worker; process 0 goes on meanwhile."""
    dead, back = Path(folder) / "worker-1" / "dead", Path(folder) / "back"
    while rank == 2 and not dead.exists():
        time.sleep(0.05)
    del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
    os.environ["RANK"] = str(min(rank, 1))
    transport = {"type": "torchft", "lighthouse": lighthouse, "min_workers": 1, "sync_budget_seconds": 10}
    callback = make_callback(transport=transport, num_workers=2)
    others: list[Any] = [[Patience(back)], [Death()], []][rank]
    trainer = make_trainer(folder, [callback, *others])
    if rank == 2:
        back.touch()
    trainer.train(resume_from_checkpoint=rank == 2)
    return {
        "anchors": callback.outer_loop.anchor_hash(),
        "parameters": fingerprint(trainer.model.parameters()).hex(),
        "inner steps": callback.outer_loop.state.inner_steps,
        "peers": [report.num_peers for report in callback.reports if report.committed],
    }


def tensors_in(path: Path) -> str:
    return fingerprint(tensor for _, tensor in sorted(load_file(path).items())).hex()


def refused_trainers(rank: int, folder: str) -> list[str]:
    """What is said to a Trainer that cannot be trained with others, and to one that resumes from elsewhere."""

    def attempt(make: Any, **arguments: Any) -> str:
        try:
            make().train(**arguments)
        except UserError as error:
            return str(error)
        return "nothing"

    def too_late() -> Trainer:
        trainer = make_trainer(folder, [])
        trainer.add_callback(make_callback())
        return trainer

    best = {"eval_strategy": "steps", "load_best_model_at_end": True, "eval_steps": SAVE_STEPS}
    said = [attempt(too_late), attempt(lambda: make_trainer(folder, [make_callback()], **best))]
    checkpoint = Path(folder) / f"worker-{rank}" / f"checkpoint-{SAVE_STEPS}"
    resume = {"resume_from_checkpoint": str(checkpoint)}
    said.append(attempt(lambda: make_trainer(f"{folder}/elsewhere", [make_callback()]), **resume))
    (checkpoint / "outer_loop.pt").write_bytes((checkpoint.with_name("checkpoint-10") / "outer_loop.pt").read_bytes())
    said.append(attempt(lambda: make_trainer(folder, [make_callback()]), **resume))
    return said


def accelerated(rank: int) -> dict[str, Any]:
    """A loop with `accelerate`: wrapped before, wrapped afterwards, and as it should be."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def attempt(action: Any) -> str:
        try:
            action()
        except UserError as error:
            return str(error)
        return "nothing"

    def attach_to(model: nn.Module) -> Any:
        return attach("diloco", model, 8, 4, warm_start_steps=0)

    wrapped = accelerator.prepare(tiny_model())
    said = {"wrapped": attempt(lambda: attach_to(wrapped)), "unwrapped": attempt(lambda: attach_to(wrapped.module))}
    model = tiny_model()
    loop = attach_to(model)
    said["wrapped later"] = attempt(lambda: accelerator.prepare(model))
    loop.finish()
    loop.close()
    said["wrapped after the end"] = attempt(lambda: accelerator.prepare(model))

    model = accelerator.prepare_model(tiny_model(), evaluation_mode=True)
    loop = attach_to(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    optimizer, batches = accelerator.prepare(optimizer, batches)
    reports, before_the_sync, seen = [], "", []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(batch["input_ids"][0, 0].item())
        if accelerator.sync_gradients:
            if loop.state.inner_steps == 3:
                before_the_sync = fingerprint(model.parameters()).hex()
            reports += loop.step()
        if loop.state.inner_steps == 5:
            break
    reports += loop.finish()
    loop.close()
    sent = [report.sent_bytes for report in reports]
    return {"said": said, "own": before_the_sync, "seen": seen, "sent": sent, "anchors": loop.anchor_hash()}


def adapters_only(rank: int) -> dict[str, Any]:
    """LoRA in a loop of one's own."""
    model = tiny_model(lora=True)
    frozen = fingerprint(param for param in model.parameters() if not param.requires_grad).hex()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    loop = attach("diloco", model, 8, 4, warm_start_steps=0)
    reports = []
    for step in range(8):
        batch = torch.utils.data.default_collate([Tokens()[8 * rank + step]])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports += loop.step()
    loop.finish()
    loop.close()
    names = [name for fragment in loop.state.fragments for name in fragment.param_names]
    after = fingerprint(param for param in model.parameters() if not param.requires_grad).hex()
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return {
        "sent": [report.sent_bytes for report in reports],
        "names": names,
        "trainable": trainable,
        "frozen": (frozen, after),
        "parameters": fingerprint(model.parameters()).hex(),
    }
