"""Pipeline parallelism: the stages of one rank, run over micro-batches by torch's 1F1B schedules."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.core.fragment import is_dtensor, local_view
from isthmus.core.types import UserError


@dataclass(frozen=True)
class LocalStages:
    """The pipeline stages that one rank runs; stage s is on rank s % num_ranks."""

    modules: Mapping[int, nn.Module]  # by number; from tokens or hidden states to hidden states or logits
    num_stages: int
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (the last stage's output, tokens) -> mean
    tied: nn.Embedding | nn.Linear | None = None  # whose weight the first rank lends the last, on these two ranks


class Pipeline:
    """Runs batches {"tokens": [batch, seq + 1] int64} through the stages of all ranks.

    Every rank calls the same method with the same batch. 1F1B (arXiv 2104.04473), interleaved where a rank has
    several stages.

    Args:
        stages: this rank's; may be sharded by `fully_shard`, each as a whole.
        device_mesh: of this worker, with a dimension "pp".
        precision: the context of forward passes in training (autocast).
    """

    def __init__(
        self, stages: LocalStages, device_mesh: DeviceMesh, precision: AbstractContextManager[Any] | None = None
    ) -> None:
        self.stages = stages
        self.group = device_mesh.get_group("pp")
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(device_mesh.device_type)  # where it computes; offloaded parameters lie elsewhere
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._scale = 1.0  # of the loss, in the present pass
        for module in stages.modules.values():
            module.forward = _within_training(precision or nullcontext(), module.forward)

    def accumulate(
        self, batch: dict[str, torch.Tensor], micro_batch_size: int | None = None, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Leave the gradient of the batch's mean loss in the parameters; return that loss, on all ranks.

        The gradient is multiplied by `loss_scale`, the loss is not.

        Raises:
            UserError: the batch does not split into as many equal micro-batches as the schedule needs.
        """
        tokens = batch["tokens"]
        num_micro_batches = count_micro_batches(len(tokens), micro_batch_size, self.num_ranks, len(self.stages.modules))
        self._lend()
        loss = self._run(tokens, num_micro_batches, True, loss_scale)
        self._return_gradient()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the batch's mean loss in evaluation mode, on all ranks; between steps, for gradients may be lost."""
        tokens = batch["tokens"]
        modules = list(self.stages.modules.values())
        was_training = [module.training for module in modules]
        for module in modules:
            module.eval()
        self._lend()
        num_micro_batches = max(n for n in range(1, self.num_ranks + 1) if len(tokens) % n == 0)
        loss = self._run(tokens, num_micro_batches, False)
        for module, training in zip(modules, was_training, strict=True):
            module.train(training)
        return loss

    def _run(self, tokens: torch.Tensor, num_micro_batches: int, backward: bool, scale: float = 1.0) -> torch.Tensor:
        """Run the schedule once; return the batch's mean loss, on all ranks."""
        tokens = tokens.to(self.device, non_blocking=True)
        key = (tokens.shape, num_micro_batches, backward)  # receive buffers are made for batches of this shape
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(num_micro_batches, backward)
        schedule = self._schedules[key]
        run = schedule.step if backward else schedule.eval
        self._scale = scale
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.rank == 0 else ()
        run(*inputs, target=tokens, losses=losses, return_outputs=False)  # logits of all micro-batches are large
        loss = torch.stack(losses).detach().sum() / scale if losses else torch.zeros((), device=self.device)
        dist.broadcast(loss, group=self.group, group_src=self.num_ranks - 1)
        return loss

    def _new_schedule(self, num_micro_batches: int, backward: bool) -> Any:
        from torch.distributed import pipelining  # takes a second to import

        stages: list[Any] = [
            pipelining.PipelineStage(module, number, self.stages.num_stages, self.device, group=self.group)
            for number, module in self.stages.modules.items()
        ]

        def share_of_loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            loss = self.stages.loss(output, tokens)
            # 0 x inf = nan: a loss that is not finite makes the gradient so, on all ranks
            return loss * self._scale * (1 / num_micro_batches + 0 * loss.detach())

        if len(stages) > 1:
            return pipelining.ScheduleInterleaved1F1B(stages, num_micro_batches, share_of_loss, scale_grads=False)
        # without a backward pass they are the same
        kind = pipelining.Schedule1F1B if backward else pipelining.ScheduleGPipe
        return kind(stages[0], num_micro_batches, share_of_loss, scale_grads=False)

    def _lend(self) -> None:
        """Copy a tied weight from the first rank, whose parameter it is, to the last."""
        if self.stages.tied is not None:
            self._pass_on(local_view(self.stages.tied.weight), 0, self.num_ranks - 1)

    def _return_gradient(self) -> None:
        """Add the last rank's gradient of a tied weight to the first rank's."""
        if self.stages.tied is None:
            return
        weight = self.stages.tied.weight
        grad = weight.grad
        assert grad is not None
        if is_dtensor(weight) and is_dtensor(grad):  # replicated, perhaps, where the embedding's weight is sharded
            weight.grad = grad = grad.redistribute(weight.device_mesh, weight.placements)
        own = local_view(grad)
        passed = own if self.rank else torch.empty_like(own)
        self._pass_on(passed, self.num_ranks - 1, 0)
        if self.rank == 0:
            own += passed
        else:
            weight.grad = None

    def _pass_on(self, tensor: torch.Tensor, source: int, target: int) -> None:
        if self.rank == source:
            dist.send(tensor, group=self.group, group_dst=target)
        else:
            dist.recv(tensor, group=self.group, group_src=source)


def count_micro_batches(batch_size: int, micro_batch_size: int | None, num_ranks: int, stages_per_rank: int = 1) -> int:
    """Return into how many micro-batches a pipeline splits a rank's batch; by default into as many as there are ranks.

    Raises:
        UserError: the micro-batches would be of different sizes, too few, or make no equal rounds.
    """
    size = min(micro_batch_size or max(1, batch_size // num_ranks), batch_size)
    number, rest = divmod(batch_size, size)
    if rest:
        raise UserError(
            f"mesh: a pipeline needs micro-batches of one size, and {size} does not divide the {batch_size} samples "
            "of a batch on one rank; set inner.micro_batch_size to a divisor"
        )
    if number < num_ranks:
        raise UserError(
            f"mesh: a pipeline of {num_ranks} ranks needs at least {num_ranks} micro-batches, {batch_size} samples "
            f"give {number}; set a larger inner.batch_size or a smaller inner.micro_batch_size"
        )
    if stages_per_rank > 1 and number % (number // num_ranks):
        raise UserError(
            f"mesh: interleaved stages take micro-batches in rounds of one size, and {number} do not split into "
            f"{number // num_ranks} rounds; choose inner.micro_batch_size so that there is a multiple of {num_ranks}"
        )
    return number


def _within_training(context: AbstractContextManager[Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function wrapped so that the context holds wherever gradients are enabled."""

    @wraps(forward)
    def call(inputs: torch.Tensor) -> Any:
        with context if torch.is_grad_enabled() else nullcontext():
            return forward(inputs)

    return call
