"""An outer loop in the Hugging Face `Trainer`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from isthmus.core import State, SyncReport, UserError
from isthmus.outer import OuterLoop, fingerprint
from isthmus.recipes import Plan, Recipe, attach
from isthmus.recipes.base import InnerOptimizer, optimizer_family
from isthmus.transport.elastic.worker_ranks import worker_number
from isthmus.transport.rendezvous import find_world

_FILE = "outer_loop.pt"  # in every checkpoint of the Trainer
_SEEDS_APART = 1_000_003  # accelerate adds the epoch to the seed: no worker may draw another one's next epoch


class OuterLoopCallback(TrainerCallback):
    """Trains the model of a `Trainer` together with the other workers, each of which has a Trainer of its own.

        Trainer(model, arguments, train_dataset=dataset, callbacks=[OuterLoopCallback("diloco", local_steps=50)])

    The Trainer sees one process, whatever torchrun has started: it wraps no model and gathers nothing. Worker k saves
    into the folder `worker-k` of `output_dir`, with the outer state in every checkpoint, and resumes from there by
    `trainer.train(resume_from_checkpoint=True)`. It draws samples in an order of its own, and random numbers, too.

    Where the recipe has workers average their gradients in the start of the run, they do, after each has clipped its
    own. Not with `fp16`: there the Trainer skips the steps of one worker where its loss was scaled too much.

    Args:
        recipe: as for `attach`.
        options: more of `attach`, such as `local_steps`; the steps are the Trainer's own, and so is the inner
            optimizer: Muon, by the name of its class, or any other.
    """

    def __init__(self, recipe: str | Recipe | Callable[[Plan], Recipe], **options: Any) -> None:
        self.recipe, self.options = recipe, options
        self.outer_loop: OuterLoop | None = None  # there from the beginning of the training on
        self.reports: list[SyncReport] = []  # of every finished sync, and of every mean of gradients

    @override
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if args.deepspeed or args.fsdp:
            raise UserError("OuterLoopCallback is for workers of one process: leave deepspeed and fsdp out")
        if args.load_best_model_at_end:
            raise UserError(
                "load_best_model_at_end would put one worker's older weights in the place of what all have learnt: "
                "set it to False, and load the best checkpoint after the training"
            )
        worker = find_world()[0] or worker_number()
        _see_one_process(args)
        state.is_local_process_zero = state.is_world_process_zero = True
        args.output_dir = str(Path(str(args.output_dir)) / f"worker-{worker}")
        torch.manual_seed(args.seed + _SEEDS_APART * worker)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if args.world_size > 1:
            raise UserError(
                "the Trainer has wrapped the model in DistributedDataParallel: give it the OuterLoopCallback when it "
                "is made, Trainer(..., callbacks=[...]), not by add_callback"
            )
        model = others["model"]
        _save_on_every_rank(model)
        saved = _load(_path(args, state), model) if state.global_step else None
        inside = _inner_optimizer(others["optimizer"])
        options = {"averages_gradients": not args.fp16, "inner_optimizer": inside, **self.options}
        self.outer_loop = attach(self.recipe, model, state.max_steps, state_dict=saved, **options)

    @override
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        assert self.outer_loop is not None
        self.outer_loop.average_gradients(others["model"].parameters())

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        assert self.outer_loop is not None
        self.reports += self.outer_loop.step()
        if self.outer_loop.state.inner_steps >= state.max_steps:  # in an elastic world perhaps before its own last step
            control.should_training_stop = True

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        assert self.outer_loop is not None
        if not args.save_only_model:
            path = _path(args, state)
            content = {"outer_loop": self.outer_loop.state_dict(), "weights": _fingerprints(others["model"])}
            torch.save(content, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        loop = self.outer_loop
        assert loop is not None
        while loop.state.phase != "finished":
            left_behind = loop.transport.limits.elastic and loop.state.inner_steps < state.max_steps
            self.reports += loop.skip() if left_behind and loop.state.phase == "training" else loop.finish()
        loop.close()


def _see_one_process(args: TrainingArguments) -> None:
    """Have the Trainer, and accelerate beneath it, see this process alone."""
    for state in (args.distributed_state, AcceleratorState()):
        state.distributed_type = DistributedType.NO
        state.num_processes, state.process_index, state.local_process_index = 1, 0, 0


def _inner_optimizer(optimizer: Any) -> InnerOptimizer:
    """Return whose rules suit the Trainer's optimizer, which accelerate has wrapped."""
    own = getattr(optimizer, "optimizer", optimizer)
    return optimizer_family(*(type(each).__name__ for each in (own, *getattr(own, "parts", ()))))


def _save_on_every_rank(model: nn.Module) -> None:
    """Have transformers write the weights of every worker: it would leave all but rank 0 of torch.distributed out."""
    for module in model.modules():
        if hasattr(module, "should_save_on_this_rank"):
            module.should_save_on_this_rank = _is_main_process  # type: ignore[assignment]


def _is_main_process(is_main_process: bool) -> bool:
    return is_main_process


def _path(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _FILE


def _load(path: Path, model: nn.Module) -> State:
    """Return the outer state that was saved with the weights which the Trainer has loaded."""
    advice = "resume by resume_from_checkpoint=True, with the output_dir of the run that was interrupted"
    if not path.exists():
        raise UserError(f"there is no outer state in {path}: {advice}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    saved, loaded = content["weights"], _fingerprints(model)
    # the Trainer passes over tensors that transformers writes under older names, such as GPT-NeoX's lm_head
    if saved != loaded and saved.items() & loaded.items() and isinstance(model, PreTrainedModel):
        model.load_state_dict(type(model).from_pretrained(path.parent).state_dict())
    if saved != _fingerprints(model):
        raise UserError(f"the outer state in {path} was saved with other weights than the Trainer has loaded: {advice}")
    outer_state: State = content["outer_loop"]
    return outer_state


def _fingerprints(model: nn.Module) -> dict[str, str]:
    """Return what differs for every trained parameter when any bit of it differs."""
    return {name: fingerprint([param]).hex() for name, param in model.named_parameters() if param.requires_grad}
