"""The ordinary training step: forward, backward, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypedDict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from isthmus.core.types import UserError
from isthmus.inner.compiled import compile_in_place, readable_compiler_errors
from isthmus.inner.step import Batch, Metrics
from isthmus.parallel.gradient import WorkerGradScaler, clip_gradient, gradient_norm
from isthmus.parallel.mesh import mean_over_shards

Precision = Literal["float32", "bfloat16", "float16"]


class StepOptions(TypedDict, total=False):
    """The options that all steps have; `SupervisedStep` says what they mean."""

    micro_batch_size: int | None
    clip_norm: float | None
    precision: Precision
    average_gradients: Callable[[list[nn.Parameter]], None] | None


class SupervisedStep:
    """Trains `model`, a module that maps a batch to its mean loss, on one batch a call.

    A step whose gradient is not finite (loss, overflow in float16) is skipped: weights, buffers of floating point
    (running statistics) and optimizer stay as they were, the step still counts. The decision depends on gradients
    alone, which a non-finite loss turns into nan, so ranks that share gradients (DDP, FSDP2) skip together.

    The loss scale of float16 lives in here only: weights are float32 and unscaled at every moment.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_schedule: Callable[[int], float] = lambda step: 1.0,
        *,
        micro_batch_size: int | None = None,
        clip_norm: float | None = 1.0,
        precision: Precision = "float32",
        average_gradients: Callable[[list[nn.Parameter]], None] | None = None,
        compile: bool = False,  # noqa: A002 (the word users know)
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Wrap model and optimizer.

        Args:
            model: maps a batch to the scalar mean of its losses; every sample weighs the same.
            optimizer: holds the peak learning rates.
            lr_schedule: factor of the learning rates at a step of the whole run.
            micro_batch_size: samples per forward pass; None takes the batch whole.
            clip_norm: largest Euclidean norm of the gradient of the whole batch; None does not clip.
            precision: of the forward pass (autocast); weights, gradients and optimizer stay as they are.
            average_gradients: called with the parameters before their gradients are clipped, to replace them by the
                mean of all workers; None: they stay this worker's own.
            compile: have torch compile the model, in place, in its first steps.
            device_mesh: of a worker of several ranks, which all make the same calls, each with its slice of the batch
                (equal slices; the same one along pp and tp); loss, norm and skipping are the worker's.
        """
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UserError(f"inner.micro_batch_size is {micro_batch_size}; choose at least 1")
        if clip_norm is not None and clip_norm <= 0:
            raise UserError(f"inner.clip_norm is {clip_norm}; choose a positive number, or null not to clip")
        self.model = model
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.micro_batch_size = micro_batch_size
        self.clip_norm = clip_norm
        self.device_mesh = device_mesh
        self.average_gradients = average_gradients
        self.progress = 0  # step of the whole run that comes next
        self.skipped_steps = 0
        self._compiler_errors = readable_compiler_errors if compile else nullcontext
        if compile:
            compile_in_place(model)
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]  # as they were before the present step
        self._peak_lrs = [group["lr"] for group in optimizer.param_groups]
        scaled = precision == "float16"
        if device_mesh is None:
            self._device = self._params[0].device
            self._scaler = torch.amp.GradScaler(self._device.type, enabled=scaled)
        else:
            self._device = torch.device(device_mesh.device_type)  # offloaded parameters are not where it computes
            self._scaler = WorkerGradScaler(device_mesh, enabled=scaled)
        self._precision: AbstractContextManager[Any] = (
            nullcontext() if precision == "float32" else torch.autocast(self._device.type, getattr(torch, precision))
        )

    def __call__(self, batch: Batch) -> Metrics:
        """Train on one batch; return loss, grad_norm (before clipping), lr (of the first group), skipped (0 or 1)."""
        factor = self.lr_schedule(self.progress)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        self.optimizer.zero_grad()  # not at the end: the C library would give the memory back, and ask for it again
        _copy(self._buffers, self._kept)
        with self._compiler_errors():
            loss = self._accumulate(batch)
        self._scaler.unscale_(self.optimizer)
        if self.average_gradients is not None:
            self.average_gradients(self._params)
        norm = self._clip()
        skipped = not math.isfinite(norm)
        if skipped:
            _copy(self._kept, self._buffers)
        else:
            self._scaler.step(self.optimizer)
        self._scaler.update()
        self.progress += 1
        self.skipped_steps += skipped
        lr = self.optimizer.param_groups[0]["lr"]
        return {"loss": loss.item(), "grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def set_progress(self, step: int) -> None:
        """Say which step of the whole run comes next; without it every call counts as one."""
        self.progress = step

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, loss scale and counters; tensors are live, not copies."""
        return {"optimizer": self.optimizer.state_dict(), **self.counters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state; peak learning rates stay those of this object's optimizer."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.load_counters(state_dict)

    def counters(self) -> dict[str, Any]:
        """Return loss scale and counters: all of the state but the optimizer's."""
        return {"scaler": self._scaler.state_dict(), "progress": self.progress, "skipped_steps": self.skipped_steps}

    def load_counters(self, state_dict: dict[str, Any]) -> None:
        """Take over what `counters` returned."""
        if state_dict["scaler"]:
            self._scaler.load_state_dict(state_dict["scaler"])
        self.progress = state_dict["progress"]
        self.skipped_steps = state_dict["skipped_steps"]

    def forward_backward(self, part: Batch) -> None:
        """Run a forward and backward pass of this rank alone, to measure it; the gradients it leaves are of no use."""
        forward = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        part = {name: tensor.to(self._device) for name, tensor in part.items()}
        with self._compiler_errors():
            with self._precision:
                loss = forward(part)
            loss.backward()

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """Leave the gradient of the batch's mean loss in the parameters; return that loss."""
        total: torch.Tensor | float = 0.0
        for part, share, last in self._micro_batches(batch):
            with self._gradient_sync(last):
                with self._precision:
                    loss = self.model(part)
                # 0 x inf = nan: a loss that is not finite makes the gradient so, on all ranks that share it
                self._scaler.scale(loss * (share + 0 * loss.detach())).backward()
            total = total + share * loss.detach()
        total = torch.as_tensor(total)
        return total if self.device_mesh is None else mean_over_shards(total, self.device_mesh)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Batch, float, bool]]:
        """Yield each micro-batch, on the model's device, with its share of the samples and whether it is the last."""
        num_samples = len(next(iter(batch.values())))
        size = self.micro_batch_size or num_samples
        for start in range(0, num_samples, size):
            end = min(start + size, num_samples)
            part = {name: tensor[start:end].to(self._device, non_blocking=True) for name, tensor in batch.items()}
            yield part, (end - start) / num_samples, end == num_samples

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Return the context that has DDP reduce gradients in the last backward pass of a batch only."""
        return nullcontext() if last or not isinstance(self.model, DistributedDataParallel) else self.model.no_sync()

    def _clip(self) -> float:
        """Clip the gradient; return the norm that it had before."""
        if self.device_mesh is None:  # of all ranks' shards, where gradients are DTensors
            norm = nn.utils.get_total_norm([param.grad for param in self._params if param.grad is not None])
        else:
            norm = gradient_norm(self._params, self.device_mesh)
        value: float = norm.item()
        if self.clip_norm is not None and self.clip_norm < value < math.inf:
            if self.device_mesh is None:
                nn.utils.clip_grads_with_norm_(self._params, self.clip_norm, norm)
            else:
                clip_gradient(self._params, self.clip_norm, value)
        return value


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)
