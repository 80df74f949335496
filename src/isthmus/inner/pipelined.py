"""The training step of a worker whose model is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack, override

from isthmus.core.types import UserError
from isthmus.inner.step import Batch
from isthmus.inner.supervised import StepOptions, SupervisedStep
from isthmus.parallel.mesh import mean_over_shards
from isthmus.parallel.pipeline import LocalStages, Pipeline


class PipelinedStep(SupervisedStep):
    """A supervised step through all stages: every rank gets the same batch and returns the same metrics.

    The gradient is clipped by its norm over all stages; where it is not finite on one, all skip the step.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: LocalStages,
        device_mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        lr_schedule: Callable[[int], float] = lambda step: 1.0,
        **options: Unpack[StepOptions],
    ) -> None:
        """Wrap one rank's stages and the optimizer of their parameters.

        Args:
            model: all parameters of this rank; see `isthmus.models.stages.split_into_stages`.
            stages: made of the same parameters.
            device_mesh: of this worker, with the dimensions pp, shard and tp.
            optimizer: holds the peak learning rates.
            lr_schedule: factor of the learning rates at a step of the whole run.
            options: without a micro_batch_size there are as many micro-batches as ranks.
        """
        super().__init__(model, optimizer, lr_schedule, device_mesh=device_mesh, **options)
        self.pipeline = Pipeline(stages, device_mesh, self._precision)

    @override
    def forward_backward(self, part: Batch) -> None:
        raise UserError("inner.micro_batch_size is auto, which cannot be measured in a pipeline: set a number")

    @override
    def _accumulate(self, batch: Batch) -> torch.Tensor:
        scale = self._scaler.scale(torch.ones((), device=self._device)).item()  # all ranks have the same
        assert self.device_mesh is not None
        return mean_over_shards(self.pipeline.accumulate(batch, self.micro_batch_size, scale), self.device_mesh)
